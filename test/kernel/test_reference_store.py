"""The reference of write-through store, prefix gather, seeding and reset, against plain loops with guards around."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.row_format import Bf16Row, Fp8DsMlaRow, RowFormat
from hisparse_kernel import reference

GUARD_ROWS = 5
FORMATS = (Bf16Row(nope_dim=24, rope_dim=8), Fp8DsMlaRow())
INDEX_DTYPES = (torch.int32, torch.int64)

formats = pytest.mark.parametrize("row_format", FORMATS, ids=lambda f: f.name)
index_dtypes = pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)


class Guarded:
    """A uint8 [rows, row_bytes] tensor of random bytes inside a larger one; `expected` is what it must become."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._all = torch.randint(0, 256, (num_rows + 2 * GUARD_ROWS, row_bytes), dtype=torch.uint8)
        self._expected = self._all.clone()
        self.rows = self._all[GUARD_ROWS:-GUARD_ROWS]
        self.expected = self._expected[GUARD_ROWS:-GUARD_ROWS]

    def check(self) -> None:
        wrong = (self._all != self._expected).any(-1).nonzero().flatten() - GUARD_ROWS
        assert not len(wrong), f"rows {wrong.tolist()} are wrong"


def tokens(row_format: RowFormat, count: int, *, middle: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [torch.randn(count, dim).bfloat16() for dim in (row_format.nope_dim, row_format.rope_dim)]
    return tuple(part.unsqueeze(1) if middle else part for part in parts)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@formats
@index_dtypes
@pytest.mark.parametrize("middle", (False, True), ids=("flat", "middle dimension of 1"))
def test_store_decode(row_format: RowFormat, index_dtype: torch.dtype, middle: bool) -> None:
    buffer, page_size = 6, 4
    regions, seq_lens, slots = [3, 1, 5], [9, 1, 4], [17, 0, 31]
    padding = 2
    k_nope, k_rope = tokens(row_format, len(regions) + padding, middle=middle)
    host, hot = Guarded(32, row_format.row_bytes), Guarded(6 * (buffer + page_size), row_format.row_bytes)
    packed = row_format.pack(k_nope, k_rope)
    for row, region, seq_len, slot in zip(packed, regions, seq_lens, slots, strict=False):
        hot.expected[region * (buffer + page_size) + buffer + (seq_len - 1) % page_size] = row
        host.expected[slot] = row

    reference.store_decode(
        k_nope=k_nope,
        k_rope=k_rope,
        slots=torch.tensor([*slots, 0, 0], dtype=index_dtype),
        seq_lens=torch.tensor([*seq_lens, 1, 1], dtype=index_dtype),
        req_pool_indices=torch.tensor([*regions, 0, 0], dtype=index_dtype),
        num_real_reqs=torch.tensor([len(regions)], dtype=torch.int32),
        host_rows=host.rows,
        hot_rows=hot.rows,
        device_buffer_size=buffer,
        page_size=page_size,
        row_format=row_format,
    )
    host.check()
    hot.check()


@formats
def test_store_decode_without_real_requests_writes_nothing(row_format: RowFormat) -> None:
    k_nope, k_rope = tokens(row_format, 2)
    host, hot = Guarded(8, row_format.row_bytes), Guarded(20, row_format.row_bytes)
    zeros = torch.zeros(2, dtype=torch.int32)
    reference.store_decode(
        k_nope=k_nope,
        k_rope=k_rope,
        slots=zeros,
        seq_lens=zeros + 1,
        req_pool_indices=zeros,
        num_real_reqs=torch.zeros(1, dtype=torch.int32),
        host_rows=host.rows,
        hot_rows=hot.rows,
        device_buffer_size=6,
        page_size=4,
        row_format=row_format,
    )
    host.check()
    hot.check()


@formats
def test_the_tail_ring_holds_the_newest_page(row_format: RowFormat) -> None:
    """Twice around the ring: after every step the newest `page_size` tokens are there, each in row `p % page_size`."""
    buffer, page_size, region = 3, 4, 1
    hot = Guarded(2 * (buffer + page_size), row_format.row_bytes)
    host = Guarded(16, row_format.row_bytes)
    written = []
    for position in range(9):
        k_nope, k_rope = tokens(row_format, 1)
        written.append(row_format.pack(k_nope, k_rope)[0])
        reference.store_decode(
            k_nope=k_nope,
            k_rope=k_rope,
            slots=torch.tensor([15 - position]),
            seq_lens=torch.tensor([position + 1]),
            req_pool_indices=torch.tensor([region]),
            num_real_reqs=torch.tensor([1], dtype=torch.int32),
            host_rows=host.rows,
            hot_rows=hot.rows,
            device_buffer_size=buffer,
            page_size=page_size,
            row_format=row_format,
        )
        for p in range(max(0, position - page_size + 1), position + 1):
            row = hot.rows[region * (buffer + page_size) + buffer + p % page_size]
            assert torch.equal(row, written[p]), f"position {p} after {position}"
    for position, row in enumerate(written):
        assert torch.equal(host.rows[15 - position], row)


@formats
@index_dtypes
@pytest.mark.parametrize("middle", (False, True), ids=("flat", "middle dimension of 1"))
@pytest.mark.parametrize("count", (0, 1, 7))
def test_store_extend(row_format: RowFormat, index_dtype: torch.dtype, middle: bool, count: int) -> None:
    k_nope, k_rope = tokens(row_format, count, middle=middle)
    host, workspace = Guarded(20, row_format.row_bytes), Guarded(12, row_format.row_bytes)
    slots, row_ids = torch.randperm(20)[:count], torch.randperm(12)[:count]
    for row, slot, row_id in zip(row_format.pack(k_nope, k_rope), slots.tolist(), row_ids.tolist(), strict=True):
        host.expected[slot] = workspace.expected[row_id] = row
    reference.store_extend(
        k_nope=k_nope,
        k_rope=k_rope,
        slots=slots.to(index_dtype),
        row_ids=row_ids.to(index_dtype),
        host_rows=host.rows,
        workspace=workspace.rows,
        row_format=row_format,
    )
    host.check()
    workspace.check()


@index_dtypes
@pytest.mark.parametrize("count", (0, 1, 9))
def test_gather(index_dtype: torch.dtype, count: int) -> None:
    host, workspace = Guarded(20, 656), Guarded(12, 656)
    slots = torch.randint(0, 20, (count,))  # two requests may share a prefix
    row_ids = torch.randperm(12)[:count]
    for slot, row_id in zip(slots.tolist(), row_ids.tolist(), strict=True):
        workspace.expected[row_id] = host.rows[slot]
    reference.gather(
        host_rows=host.rows,
        slots=slots.to(index_dtype),
        workspace=workspace.rows,
        row_ids=row_ids.to(index_dtype),
    )
    host.check()
    workspace.check()


@given(
    buffer=st.integers(1, 6),
    page_size=st.integers(1, 3),
    num_candidates=st.integers(1, 14),
    index_dtype=st.sampled_from(INDEX_DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_seed(buffer: int, page_size: int, num_candidates: int, index_dtype: torch.dtype, seed: int) -> None:
    """Distinct candidates in order, one LRU row each until the region is full; the first is the most recently used."""
    rng, region_rows, row_bytes, num_regions = random.Random(seed), buffer + page_size, 16, 5
    torch.manual_seed(seed % 1000)
    regions = rng.sample(range(1, num_regions), rng.randint(0, 3))
    candidates = [[rng.randint(-2, 9) for _ in range(num_candidates)] for _ in regions]
    starts = rng.sample(range(30), len(regions))
    workspace, hot = Guarded(40, row_bytes), Guarded(num_regions * region_rows, row_bytes)
    owners = torch.full((num_regions, buffer), -1, dtype=torch.int32)
    lru_order = torch.arange(buffer, dtype=torch.int16).repeat(num_regions, 1)
    owners[0], lru_order[0] = 77, lru_order[0].flip(0)
    expected_owners, expected_order = owners.clone(), lru_order.clone()
    for region, start, chosen in zip(regions, starts, candidates, strict=True):
        held = [position for position in dict.fromkeys(chosen) if position >= 0][:buffer]
        for row, position in enumerate(held):
            hot.expected[region * region_rows + row] = workspace.rows[start + position]
            expected_owners[region, row] = position
        order = [*range(len(held), buffer), *reversed(range(len(held)))]
        expected_order[region] = torch.tensor(order)
    reference.seed(
        candidates=torch.tensor(candidates, dtype=torch.int32).reshape(len(regions), num_candidates),
        regions=torch.tensor(regions, dtype=index_dtype),
        workspace_starts=torch.tensor(starts, dtype=index_dtype),
        workspace=workspace.rows,
        hot_rows=hot.rows,
        owners=owners,
        lru_order=lru_order,
        page_size=page_size,
    )
    workspace.check()
    hot.check()
    assert torch.equal(owners, expected_owners)
    assert torch.equal(lru_order, expected_order)


@index_dtypes
@pytest.mark.parametrize("regions", ([], [2], [4, 1]), ids=str)
def test_reset(index_dtype: torch.dtype, regions: list[int]) -> None:
    owners = torch.randint(-1, 100, (3, 6, 8), dtype=torch.int32)
    lru_order = torch.arange(8, dtype=torch.int16).flip(0).repeat(3, 6, 1)
    tail_start = torch.arange(6, dtype=torch.int32) + 50
    expected = owners.clone(), lru_order.clone(), tail_start.clone()
    seq_lens = [7 + region for region in regions]
    for region, seq_len in zip(regions, seq_lens, strict=True):
        for layer in range(3):
            expected[0][layer, region] = -1
            expected[1][layer, region] = torch.arange(8, dtype=torch.int16)
        expected[2][region] = seq_len
    reference.reset(
        owners=owners,
        lru_order=lru_order,
        tail_start=tail_start,
        regions=torch.tensor(regions, dtype=index_dtype),
        seq_lens=torch.tensor(seq_lens, dtype=index_dtype),
    )
    for got, wanted in zip((owners, lru_order, tail_start), expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
