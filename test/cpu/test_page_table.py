"""page_table.py and row_store.py against loops over tokens."""

import pytest
import torch

from hisparse.cpu.page_table import decode_slots, last_slot, prefill_slots
from hisparse.cpu.row_store import set_rows


def lookup(table: torch.Tensor, positions: torch.Tensor) -> list[int]:
    return [int(table[p]) if p >= 0 else -1 for p in positions.tolist()]


def selection(rows: int, top_k: int, width: int) -> torch.Tensor:
    positions = torch.randint(0, width, (rows, top_k), dtype=torch.int32)
    return positions.masked_fill(torch.rand(rows, top_k) < 0.3, -1)


def test_decode():
    table, positions = torch.randint(0, 10**6, (5, 30), dtype=torch.int32), selection(5, 7, 30)
    got = decode_slots(page_table=table, topk_indices=positions, page_size=1)
    assert got.dtype == torch.int32
    assert got.tolist() == [lookup(table[i], positions[i]) for i in range(5)]


@pytest.mark.parametrize("expanded", [False, True])
def test_prefill(expanded):
    extend = [3, 0, 1, 4]
    request = [i for i, n in enumerate(extend) for _ in range(n)]
    table, positions = torch.randint(0, 10**6, (4, 30), dtype=torch.int32), selection(9, 7, 30)  # 8 queries, 1 padding
    got = prefill_slots(
        page_table=table[request] if expanded else table,
        topk_indices=positions,
        extend_lens_cpu=extend,
        page_size=1,
        output_num_tokens=11,
        page_table_is_expanded=expanded,
        cu_seqlens_q=None,
    )
    assert (got.dtype, got.shape) == (torch.int32, (11, 7))
    assert got[:8].tolist() == [lookup(table[request[i]], positions[i]) for i in range(8)]
    assert (got[8:] == -1).all(), "padding rows"


def test_last_slot():
    table = torch.randint(1, 10**6, (6, 20), dtype=torch.int32)
    rows, prefix = torch.tensor([4, 2, 5]), torch.tensor([0, 1, 20])
    assert last_slot(table, rows, prefix).tolist() == [-1, int(table[2, 0]), int(table[5, 19])]
    assert last_slot(table, rows, prefix).dtype == torch.int64


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_set_rows_writes_nope_then_rope_and_nothing_else(source):
    pool = torch.randn(50, 1, 24).bfloat16()
    before = pool.clone()
    slots = torch.tensor([7, 49, 0])
    nope, rope = torch.randn(3, 1, 16, dtype=source), torch.randn(3, 1, 6, dtype=source)
    set_rows(pool, slots, nope, rope)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot, 0, :16], nope[i, 0].bfloat16())
        assert torch.equal(pool[slot, 0, 16:22], rope[i, 0].bfloat16())
    pool[slots, :, :22] = before[slots, :, :22]
    assert torch.equal(pool, before)
