"""GPUs and what their link to host memory was measured to carry."""

from __future__ import annotations

from typing import NamedTuple

from hisparse.budget import GIB
from hisparse.config import HiSparseError

GPU_MEMORY_GIB = {"h100": 79.1, "h200": 139.8, "h20": 95.1}
"""Memory that CUDA reports, not the name on the box. GPUs of sm_90, the only architecture the kernels are for."""

RUNTIME_BYTES = 2 * GIB
"""CUDA context, NCCL and cuBLAS before the weights are loaded: an assumption."""

RESERVE_BYTES = int(14.5 * GIB)
"""What SGLang 0.5.17 keeps back for activations and graphs at its defaults for such GPUs: chunks of 8,192 tokens,
decode graphs up to batch 512, tensor parallel 8. Sets the default of --mem-fraction-static here."""


class LinkRate(NamedTuple):
    """Rows that swap-in's gather reads from pinned host memory, bytes a second.

    near: each request's slots lie together. scattered: its pages lie anywhere in a pool of 30 GB.
    """

    near: float
    scattered: float


LINK_RATES = {1152: LinkRate(49e9, 43e9), 656: LinkRate(43e9, 28e9)}
"""By row bytes, measured on one H200 (PCIe 5 x16, one GPU at a time), 2026-11-30. Other GPUs with such a link are
assumed to be alike; that all GPUs of a host reach this at the same time is an assumption too."""

STEP_OVERHEAD_S = 7e-6
"""Swap-in of one layer with nothing to copy, on the same machine (docs/benchmarks.md)."""


def link_rate(row_bytes: int, link_gb_s: float | None) -> LinkRate:
    """The measured rate for this row, or the user's; rows never measured take the rate of the nearest size."""
    if link_gb_s is not None:
        return LinkRate(link_gb_s * 1e9, link_gb_s * 1e9)
    nearest = min(LINK_RATES, key=lambda measured: abs(measured - row_bytes))
    return LINK_RATES[nearest]


def gpu_memory_bytes(gpu: str) -> int:
    if gpu not in GPU_MEMORY_GIB:
        raise HiSparseError(
            f"--gpu {gpu} must be one of {', '.join(GPU_MEMORY_GIB)}; for another GPU give --gpu-memory-gib."
        )
    return int(GPU_MEMORY_GIB[gpu] * GIB)


def default_fraction(memory_bytes: int) -> float:
    """--mem-fraction-static, rounded down to a hundredth, that leaves `RESERVE_BYTES`; a tenth of a smaller GPU."""
    reserve = RESERVE_BYTES if memory_bytes > 4 * RESERVE_BYTES else memory_bytes // 10
    return int((memory_bytes - reserve) / memory_bytes * 100) / 100
