"""The indexer's top-k, answered in positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MAX_TOP_K = 2048
"""The fused kernel selects at most as many."""


@dataclass(frozen=True)
class PositionTopK:
    """Stands where SGLang's `DSATopKBackend` stands in the indexer's metadata.

    SGLang's decode fuses the selection with a page-table look-up and returns slots of a full device pool; its own
    answer in positions is an older, separate kernel. The fused kernel can hand out the positions it looked up, so
    decode keeps the fast one. Prefill, and back ends other than SGLang's kernel, take the plain top-k.
    """

    backend: Any
    fused: bool
    """Whether SGLang would take its fused kernel too, so that both break ties alike."""

    def topk_transform(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        attn_metadata: Any,
        row_starts: torch.Tensor | None = None,
        batch_idx_list: list[int] | None = None,
        **_ignored: Any,
    ) -> torch.Tensor:
        """Positions of the `topk` largest of logits[row, :lengths[row]], int32 [rows, topk], -1 behind the last.

        Args:
            logits: float32 [rows, width]. lengths: int32 [rows].
            attn_metadata: SGLang's `DSAMetadata`; its page table has a row for each of `logits` in decode alone.
            row_starts: where a row's scores begin (prefill).
        """
        pages, plan = attn_metadata.real_page_table, attn_metadata.topk_v2_plan
        rows = logits.shape[0]
        decode = row_starts is None and batch_idx_list is None and pages.shape[0] == lengths.shape[0] == rows
        planned = plan is not None and plan.shape[0] == rows + 1
        if not (self.fused and topk <= MAX_TOP_K and decode and planned and self.backend.should_use_topk_v2()):
            return self.backend.topk_func(logits, lengths, topk, row_starts=row_starts)
        from sglang.kernels.ops.attention.dsv4.topk import topk_transform_512_v2

        positions = logits.new_full((rows, topk), -1, dtype=torch.int32)
        slots = torch.empty_like(positions)
        topk_transform_512_v2(
            logits, lengths.to(torch.int32), pages, slots, attn_metadata.page_size, plan, out_raw_indices=positions
        )
        return positions
