"""top_k.py and the block-wise selection of indexer.py against sorting, one row at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cpu.index_logits import mqa_logits
from hisparse.cpu.indexer import ragged_top_k
from hisparse.cpu.quantize import act_quant
from hisparse.cpu.top_k import first_positions, top_k_positions, topk_unfused


def select(logits: list[float], top_k: int) -> list[int]:
    """Best first, lower position first among equals; then ascending, padded with -1."""
    best = sorted((p for p in range(len(logits)) if logits[p] != float("-inf")), key=lambda p: (-logits[p], p))[:top_k]
    return sorted(best) + [-1] * (top_k - len(best))


few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 2.5, float("inf"), float("-inf")])


@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(few_values, max_size=12)), min_size=1, max_size=5),
    st.integers(1, 14),
)
def test_selects_like_sorting_with_ties_and_starts(rows, top_k):
    width = max(start + len(values) for start, values in rows) + 2
    logits = torch.full((len(rows), width), 99.0)  # what lies outside a row's range must not be selected
    for i, (start, values) in enumerate(rows):
        logits[i, start : start + len(values)] = torch.tensor(values)
    starts = torch.tensor([start for start, _ in rows], dtype=torch.int32)
    lengths = torch.tensor([len(values) for _, values in rows], dtype=torch.int32)
    got = top_k_positions(logits, lengths, top_k, starts)
    assert got.dtype == torch.int32
    assert got.tolist() == [select(values, top_k) for _, values in rows]


def test_selects_like_sorting_random_rows():
    logits = torch.randn(20, 700)
    lengths = torch.arange(35, 735, 35, dtype=torch.int32)
    got = topk_unfused(logits, lengths, 100)
    assert got.tolist() == [select(logits[i, :n].tolist(), 100) for i, n in enumerate(lengths.tolist())]


def test_the_batchs_width_changes_nothing():
    logits = torch.zeros(1, 5000)  # all ties
    narrow = top_k_positions(logits[:, :300], torch.tensor([300]), 64)
    assert torch.equal(narrow, top_k_positions(logits, torch.tensor([300]), 64))
    assert narrow[0].tolist() == list(range(64))


def test_first_positions_is_top_k_of_short_rows():
    lengths = torch.tensor([0, 1, 7, 8], dtype=torch.int32)
    assert torch.equal(first_positions(lengths, 8), top_k_positions(torch.randn(4, 8), lengths, 8))


@pytest.mark.parametrize("block_bytes", [1, 2_000, 10**9])
def test_ragged_selection_in_blocks_is_selection_row_by_row(monkeypatch, block_bytes):
    monkeypatch.setattr("hisparse.cpu.scratch.BLOCK_BYTES", block_bytes)
    heads, d, top_k = 2, 128, 16
    requests = [(5, 5), (3, 40), (30, 64)]  # queries, keys
    tokens, total = sum(q for q, _ in requests), sum(k for _, k in requests)
    queries, weights = act_quant(torch.randn(tokens, heads, d))[0], torch.randn(tokens, heads)
    keys, scale = act_quant(torch.randn(total, d))
    starts, ends, first = [], [], 0
    for q, k in requests:
        starts += [first] * q
        ends += range(first + k - q + 1, first + k + 1)
        first += k
    got = ragged_top_k(queries, weights, keys, scale.squeeze(1), torch.tensor(starts), torch.tensor(ends), top_k)
    for i in range(tokens):
        seen = slice(starts[i], ends[i])
        one = mqa_logits(queries[i : i + 1].float(), keys[seen].float(), scale[seen, 0], weights[i : i + 1])
        assert got[i].tolist() == select(one[0].tolist(), top_k)
