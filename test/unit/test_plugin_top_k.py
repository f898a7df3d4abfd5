"""Which top-k answers: SGLang's fused kernel only where SGLang itself would take it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hisparse.plugin.top_k import MAX_TOP_K, PositionTopK


class PlainBackend:
    """SGLang's top-k back end, as far as prefill and unfused decode use it."""

    def __init__(self) -> None:
        self.row_starts: list[Any] = []

    def should_use_topk_v2(self) -> bool:
        return True

    def topk_func(self, logits: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: Any = None) -> torch.Tensor:
        self.row_starts.append(row_starts)
        return logits.topk(topk).indices.int()


def metadata(rows: int, plan_rows: int | None) -> SimpleNamespace:
    plan = None if plan_rows is None else torch.zeros(plan_rows, 2, dtype=torch.int32)
    return SimpleNamespace(real_page_table=torch.zeros(rows, 1, dtype=torch.int32), topk_v2_plan=plan, page_size=64)


@pytest.mark.parametrize(
    ("fused", "top_k", "table_rows", "plan_rows", "row_starts"),
    [
        (False, 4, 3, 4, None),  # SGLANG_DSA_FUSE_TOPK=0
        (True, MAX_TOP_K + 1, 3, 4, None),
        (True, 4, 1, 4, None),  # prefill: a page table a request, a score row a token
        (True, 4, 3, None, None),
        (True, 4, 3, 3, None),
        (True, 4, 3, 4, torch.zeros(3)),
    ],
)
def test_the_plain_top_k_answers(
    fused: bool, top_k: int, table_rows: int, plan_rows: int | None, row_starts: torch.Tensor | None
) -> None:
    backend = PlainBackend()
    logits = torch.randn(3, MAX_TOP_K + 8)
    lengths = torch.full((3,), logits.shape[1])
    found = PositionTopK(backend, fused).topk_transform(
        logits, lengths, top_k, metadata(table_rows, plan_rows), row_starts=row_starts, topk_transform_method="PAGED"
    )
    assert torch.equal(found, logits.topk(top_k).indices.int())
    assert len(backend.row_starts) == 1 and backend.row_starts[0] is row_starts
