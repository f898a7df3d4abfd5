"""The link between GPU and host memory: large copies, and single rows as swap-in reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from hisparse.bench.setup import DEVICE, PAGE, HostPool
from hisparse.bench.timing import Timing
from hisparse_kernel import cuda_ops

COPY_BYTES = 1 << 30
ROWS = 16_384
"""Rows of one gather: about 10 MB, so that the launch does not count."""

SETS = 8
"""Gathers of different rows, so that no row is in a cache from the one before."""

NEAR_TOKENS = 131_072
"""A request's slots when they lie together."""


class RowRate(NamedTuple):
    """GB/s of a gather of rows, near: from slots of one long request; far: from pages all over the pool."""

    row_bytes: int
    near: float
    far: float


def copy_rates(pool: HostPool, timing: Timing) -> tuple[float, float]:
    """GB/s of one large copy from pinned host memory to the device, and back."""
    host = pool.rows(PAGE).flatten()[:COPY_BYTES]
    device = torch.empty_like(host, device=DEVICE)
    rates = []
    for target, source in ((device, host), (host, device)):
        # The device's bytes are the host's: the copy back changes nothing.
        us = timing.device_us([partial(target.copy_, source, non_blocking=True)])
        rates.append(host.numel() / us / 1000)
    return rates[0], rates[1]


def row_rate(pool: HostPool, row_bytes: int, timing: Timing) -> RowRate:
    """Random rows by the kernel that gathers prefixes; swap-in's copies run at the same rate."""
    host = pool.rows(row_bytes)
    hot = torch.empty(ROWS, row_bytes, dtype=torch.uint8, device=DEVICE)
    targets = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    rates = [
        ROWS * row_bytes / timing.device_us([partial(_gather, host, slots, hot, targets) for slots in sets]) / 1000
        for sets in (slot_sets(host.shape[0], NEAR_TOKENS), slot_sets(host.shape[0], host.shape[0]))
    ]
    return RowRate(row_bytes, *rates)


def slot_sets(num_slots: int, within: int) -> list[torch.Tensor]:
    """int32 [ROWS], distinct slots in random order, from a stretch of `within` slots that moves through the pool."""
    within = min(within, num_slots)
    starts = torch.linspace(0, num_slots - within, SETS).long().tolist()
    return [(start + torch.randperm(within, device=DEVICE)[:ROWS]).int() for start in starts]


def _gather(host: torch.Tensor, slots: torch.Tensor, hot: torch.Tensor, targets: torch.Tensor) -> None:
    cuda_ops.gather(host_rows=host, slots=slots, workspace=hot, row_ids=targets)


def text(to_device: float, to_host: float, rates: Sequence[RowRate]) -> str:
    lines = [f"large copies: host to device {to_device:.1f} GB/s, device to host {to_host:.1f} GB/s"]
    lines += [
        f"random rows of {rate.row_bytes:,} B: near {rate.near:.1f} GB/s, far {rate.far:.1f} GB/s "
        f"(hisparse plan --link-gb-s {rate.near:.0f})"
        for rate in rates
    ]
    return "\n".join(lines)
