"""How a prefill batch is laid out in the workspace: every token once, every row once, nothing beyond the capacity."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.extend_plan import ExtendGroup, pack_requests, plan_extend

CAPACITY = 40
SEED_QUERIES = 3


@given(seq_lens=st.lists(st.integers(0, CAPACITY), max_size=20))
def test_packing_keeps_order_and_capacity_and_never_splits_without_need(seq_lens: list[int]) -> None:
    groups = pack_requests(seq_lens, CAPACITY)
    assert [index for group in groups for index in group] == list(range(len(seq_lens)))
    assert all(len(group) for group in groups)
    used = [sum(seq_lens[index] for index in group) for group in groups]
    assert all(tokens <= CAPACITY for tokens in used)
    for group, tokens in zip(groups[1:], used, strict=False):
        assert tokens + seq_lens[group[0]] > CAPACITY, "the next request would have fitted"


def test_a_sequence_longer_than_the_workspace_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="41 tokens does not fit a workspace of 40"):
        pack_requests([3, 41], CAPACITY)


@dataclass
class Batch:
    prefix_lens: list[int]
    extend_lens: list[int]
    regions: list[int]
    req_to_token: torch.Tensor
    new_slots: list[int]
    groups: list[ExtendGroup]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lens = draw(
        st.lists(
            st.integers(1, CAPACITY).flatmap(lambda total: st.tuples(st.integers(0, total - 1), st.just(total))),
            min_size=1,
            max_size=6,
        )
    )
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    prefix_lens = [prefix for prefix, _ in lens]
    extend_lens = [total - prefix for prefix, total in lens]
    regions = rng.sample(range(1, 10), len(lens))
    req_to_token = torch.tensor(rng.sample(range(10 * 50), 10 * 50), dtype=torch.int32).reshape(10, 50)
    new_slots = []
    for region, (prefix, length) in zip(regions, lens, strict=True):
        new_slots += req_to_token[region, prefix:length].tolist()
    padding = [0] * draw(st.integers(0, 3))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    groups = plan_extend(
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        req_pool_indices=torch.tensor(regions, dtype=dtype),
        out_cache_loc=torch.tensor(new_slots + padding, dtype=dtype),
        req_to_token=req_to_token,
        capacity=CAPACITY,
        seed_queries=SEED_QUERIES,
    )
    return Batch(prefix_lens, extend_lens, regions, req_to_token, new_slots, groups)


@given(batch=batches())
@settings(max_examples=100)
def test_every_token_has_its_row_and_slot(batch: Batch) -> None:
    """Built again from each request's point of view: position p lies in row `start + p`, its slot is the table's."""
    request, token = 0, 0
    for group in batch.groups:
        prefix, new, token_starts, used = [], [], [], 0
        assert group.tokens.start == token
        for region, start in zip(group.regions.tolist(), group.starts.tolist(), strict=True):
            assert region == batch.regions[request]
            assert start == used
            prefix_len, seq_len = batch.prefix_lens[request], batch.prefix_lens[request] + batch.extend_lens[request]
            slots = batch.req_to_token[region, :seq_len].tolist()
            prefix += [(slot, start + p) for p, slot in enumerate(slots[:prefix_len])]
            new += [(slot, start + p) for p, slot in enumerate(slots) if p >= prefix_len]
            token_starts += [[start]] * (seq_len - prefix_len)
            used += seq_len
            token += seq_len - prefix_len
            request += 1
        assert used <= CAPACITY
        assert group.tokens.stop == token
        assert list(zip(group.prefix_slots.tolist(), group.prefix_rows.tolist(), strict=True)) == prefix
        assert list(zip(group.new_slots.tolist(), group.new_rows.tolist(), strict=True)) == new
        assert group.token_starts.tolist() == token_starts
        rows = group.prefix_rows.tolist() + group.new_rows.tolist()
        assert sorted(rows) == list(range(used)), "rows overlap or leave gaps"
    assert request == len(batch.regions)
    assert token == len(batch.new_slots)


@given(batch=batches())
@settings(max_examples=60)
def test_last_tokens_are_each_requests_last_queries_newest_first(batch: Batch) -> None:
    extend_lens = iter(batch.extend_lens)
    for group in batch.groups:
        end = 0
        for last in group.last_tokens.tolist():
            first, end = end, end + next(extend_lens)
            assert last == [max(end - 1 - i, first) for i in range(SEED_QUERIES)]
        names = ("regions", "starts", "prefix_slots", "prefix_rows", "new_slots", "new_rows", "last_tokens")
        assert {name: getattr(group, name).dtype for name in names} == dict.fromkeys(names, torch.int64)
        assert (group.token_starts.dtype, group.token_starts.shape[1]) == (torch.int32, 1)


def test_an_empty_batch_has_no_groups() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    table = torch.zeros((2, 8), dtype=torch.int32)
    groups = plan_extend(
        prefix_lens=[],
        extend_lens=[],
        req_pool_indices=nothing,
        out_cache_loc=nothing,
        req_to_token=table,
        capacity=CAPACITY,
        seed_queries=SEED_QUERIES,
    )
    assert groups == []
