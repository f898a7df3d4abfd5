"""A plug-in of SGLang for the serving benchmark: decode selects what we say instead of what random weights would.

HISPARSE_BENCH_SELECTION=FILE   read the share of the selection that is new in each step from FILE, again and again

The same positions come to SGLang without HiSparse, with its own and with ours, and the indexer still does all its work
before its answer is replaced.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

VARIABLE = "HISPARSE_BENCH_SELECTION"
POLL_S = 0.1

CHOICES = 16
"""Positions that one entry of the selection goes through in turn, so a dropped position comes back after 16 changes of
its entry, long after a buffer of twice top-k has evicted it. Needs 16 * top-k positions; shorter requests select as
their indexer says."""


class MissRate:
    """A float on the device that follows a file; below 0, or while there is no file: select as the indexer says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_device = torch.full((1,), -1.0, dtype=torch.float32, device="cuda")
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        stream, seen = torch.cuda.Stream(), ""
        while True:
            time.sleep(POLL_S)
            text = self.path.read_text().strip() if self.path.exists() else "-1"
            # Not during capture, where a copy from another thread is an error: the first file comes after the start.
            if text and text != seen and (seen or text != "-1"):
                with torch.cuda.stream(stream):
                    self.on_device.copy_(torch.tensor([float(text)]).pin_memory())
                seen = text


@triton.jit
def _mixed(value):  # type: ignore[no-untyped-def]
    """A hash of 32 bits (the finaliser of MurmurHash3)."""
    value = value ^ (value >> 16)
    value = value * 0x85EBCA6B
    value = value ^ (value >> 13)
    value = value * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def _select(  # type: ignore[no-untyped-def]
    selected, miss_rate, requests, seq_lens, req_to_token, table_width, layer,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.load(miss_rate)
    seq_len = tl.load(seq_lens + row).to(tl.int64)
    request = tl.load(requests + row).to(tl.int64)
    if (rate >= 0) & (seq_len >= TOP_K * CHOICES):
        noise = _mixed((entry + TOP_K * (layer + 64 * request)).to(tl.uint32))
        phase = (noise & 0xFFFF).to(tl.float64) / 65536.0
        changes = (seq_len.to(tl.float64) * rate + phase).to(tl.int64)
        choice = ((noise >> 16).to(tl.int64) + changes) % CHOICES
        position = entry + TOP_K * choice
        inside = entry < TOP_K
        if SLOTS:  # noqa: SIM108
            answer = tl.load(req_to_token + request * table_width + position, mask=inside)
        else:
            answer = position
        tl.store(selected + row * TOP_K + entry, answer.to(tl.int32), mask=inside)


def replace_selection(result: Any, rate: MissRate, forward_batch: Any, layer: int, slots: bool) -> Any:
    """Overwrite a decode step's selection, int32 [batch, top_k] on the device, in place.

    Entry j names position j + top_k * c; c goes one further in `rate` of all steps, in each entry at another time.
    """
    if result is None or not forward_batch.forward_mode.is_decode():
        return result
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool

    table = get_req_to_token_pool().req_to_token if slots else result
    rows, top_k = result.shape
    block = 1024
    _select[(rows, triton.cdiv(top_k, block))](
        result, rate.on_device, forward_batch.req_pool_indices, forward_batch.seq_lens, table, table.stride(0), layer,
        TOP_K=top_k, CHOICES=CHOICES, SLOTS=slots, BLOCK=block,
    )  # fmt: skip
    return result


def register() -> None:
    if not (file := os.environ.get(VARIABLE)):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    rate: list[MissRate] = []

    def after_top_k(result: Any, indexer: Any, forward_batch: Any, layer_id: int, *_: Any, **__: Any) -> Any:
        if not rate:
            rate.append(MissRate(Path(file)))
        slots = os.environ.get("HISPARSE_BENCH_SLOTS") == "1"
        return replace_selection(result, rate[0], forward_batch, layer_id, slots)

    HookRegistry.register(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_paged", after_top_k, HookType.AFTER
    )
