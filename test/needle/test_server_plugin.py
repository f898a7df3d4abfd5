"""The dense attention that the recall benchmark puts into its server, against the product's operator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hisparse.cpu.sparse_attention import sparse_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "needle" / "server_plugin"))
from needle_server_plugin import dense_attention

WIDTH = 700  # index_topk
VALUE_DIM = 24


def selection(slots: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
    """For queries that see first..last rows each: the rows, then -1."""
    return [torch.cat((slots[:n], torch.full((WIDTH - n,), -1))) for n in range(first, last + 1)]


@pytest.mark.parametrize("decode", [False, True])
def test_equals_the_products_operator(decode: bool) -> None:
    """Requests that share a prefix, and one whose length continues the one before it; padding at the end."""
    torch.manual_seed(0)
    slots = torch.randperm(4000)
    a, b = slots[:600], torch.cat((slots[:500], slots[1000:1200]))
    chosen = (
        selection(a, 600, 600) + selection(b, 601, 601) if decode else selection(a, 1, 560) + selection(b, 561, 600)
    )
    indices = torch.stack([*chosen, torch.full((WIDTH,), -1)]).int()
    rows = torch.randn(4000, 1, 32).bfloat16()
    queries = torch.randn(len(indices), 3, 32).bfloat16()
    expected = sparse_attention(queries, rows, indices, 0.2, VALUE_DIM)
    torch.testing.assert_close(dense_attention(queries, rows, indices, 0.2, VALUE_DIM), expected, atol=2e-2, rtol=2e-2)


def test_a_selection_with_a_gap_is_refused() -> None:
    indices = torch.tensor([[0, 1, 2, -1], [0, 1, -1, 3]]).int()
    with pytest.raises(AssertionError, match="before its end"):
        dense_attention(torch.randn(2, 1, 8), torch.randn(9, 8), indices, 1.0, 4)
