"""sparse_attention.py against the formula in float64, and against poison."""

import pytest
import torch

from hisparse.cpu.sparse_attention import forward_flashmla_sparse, sparse_attention

NAN = float("nan")


def formula(queries, rows, indices, scale, value_dim):
    """One token and one head at a time, reading only named rows."""
    out = torch.zeros(*queries.shape[:2], value_dim, dtype=torch.float64)
    for t in range(len(queries)):
        named = [i for i in indices[t].tolist() if i >= 0]
        for h in range(queries.shape[1] if named else 0):
            k = rows[named].double()
            p = torch.softmax(k @ queries[t, h].double() * scale, 0)
            out[t, h] = p @ k[:, :value_dim]
    return out


def case(tokens, heads=3, d=40, slots=90, top_k=13, absent=0.3, dtype=torch.bfloat16):
    """Queries, rows and indices without repeats in a row; row 0 is never named and is poisoned, as is row 17."""
    generator = torch.Generator().manual_seed(tokens * 1000 + top_k)
    queries = torch.randn(tokens, heads, d, generator=generator).to(dtype)
    rows = torch.randn(slots, d, generator=generator).to(dtype)
    rows[0] = rows[17] = NAN
    usable = [i for i in range(1, slots) if i != 17]
    order = torch.stack([torch.randperm(len(usable), generator=generator)[:top_k] for _ in range(tokens)])
    indices = torch.tensor(usable)[order].to(torch.int32)
    indices[torch.rand(indices.shape, generator=generator) < absent] = -1
    return queries, rows, indices


@pytest.mark.parametrize("absent", [0.0, 0.3])
@pytest.mark.parametrize("top_k", [1, 13, 64])
@pytest.mark.parametrize("block_bytes", [1, 10**9])
def test_is_the_formula(monkeypatch, absent, top_k, block_bytes):
    monkeypatch.setattr("hisparse.cpu.scratch.BLOCK_BYTES", block_bytes)
    queries, rows, indices = case(11, top_k=top_k, absent=absent, dtype=torch.float32)
    got = sparse_attention(queries, rows, indices, 0.2, 24)
    torch.testing.assert_close(got.double(), formula(queries, rows, indices, 0.2, 24), rtol=1e-5, atol=1e-5)


def test_bfloat16_in_bfloat16_out():
    queries, rows, indices = case(5)
    got = sparse_attention(queries, rows.unsqueeze(1), indices, 0.2, 24)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), formula(queries, rows, indices, 0.2, 24), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("poison", [NAN, float("inf"), 3e38])
def test_unnamed_rows_never_matter(poison):
    queries, rows, indices = case(8)
    clean = sparse_attention(queries, rows.nan_to_num(0.0), indices, 0.2, 24)
    named = torch.zeros(len(rows), dtype=torch.bool)
    named[indices[indices >= 0].long()] = True
    rows[~named] = poison
    assert torch.equal(sparse_attention(queries, rows, indices, 0.2, 24), clean)
    assert clean.isfinite().all()


@pytest.mark.parametrize("part", [slice(0, 24), slice(24, 40), slice(0, 1)])
def test_a_named_poisoned_row_shows_in_its_own_token_only(part):
    queries, rows, indices = case(8, absent=0.2)
    clean = sparse_attention(queries, rows, indices, 0.2, 24)
    victim = int(indices[3][indices[3] >= 0][0])
    rows[victim, part] = NAN
    got = sparse_attention(queries, rows, indices, 0.2, 24)
    hit = (indices == victim).any(-1)
    assert hit[3]
    assert got[hit].isnan().any(-1).all(), "every head of a token that named the row"
    assert torch.equal(got[~hit], clean[~hit])


def test_a_token_that_names_nothing_gets_zeros():
    queries, rows, indices = case(4)
    indices[2] = -1
    got = sparse_attention(queries, rows, indices, 0.2, 24)
    assert (got[2] == 0).all() and got.isfinite().all()
    assert (sparse_attention(queries, rows, torch.full_like(indices, -1), 0.2, 24) == 0).all()
    assert sparse_attention(queries[:0], rows, indices[:0], 0.2, 24).shape == (0, 3, 24)


def test_row_ids_do_not_matter_bit_for_bit():
    queries, rows, indices = case(16, top_k=48, d=64)
    where = torch.randperm(len(rows))
    moved = torch.empty_like(rows)
    moved[where] = rows
    renamed = torch.where(indices >= 0, where[indices.clamp_min(0).long()], -1).to(torch.int32)
    assert torch.equal(
        sparse_attention(queries, moved, renamed, 0.1, 48), sparse_attention(queries, rows, indices, 0.1, 48)
    )


def test_the_batch_does_not_matter_bit_for_bit():
    queries, rows, indices = case(8, heads=4, top_k=256, d=192, slots=600)
    together = sparse_attention(queries, rows, indices, 0.1, 128)
    for t in range(8):
        one = slice(t, t + 1)
        assert torch.equal(sparse_attention(queries[one], rows, indices[one], 0.1, 128), together[one])


def test_sglang_signature():
    queries, rows, indices = case(5)
    got = forward_flashmla_sparse(
        None,
        q_all=queries,
        kv_cache=rows.unsqueeze(1),
        v_head_dim=24,
        page_table_1=indices,
        sm_scale=0.2,
        topk_length=None,
    )
    assert torch.equal(got, sparse_attention(queries, rows, indices, 0.2, 24))
