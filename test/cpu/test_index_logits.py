"""index_logits.py and index_buffer.py against loops over tokens in float64."""

from types import SimpleNamespace

import pytest
import torch

from hisparse.cpu.index_buffer import get_k_and_s, set_k_and_s
from hisparse.cpu.index_logits import mqa_logits, paged_mqa_logits
from hisparse.cpu.quantize import act_quant

PAGE, D = 64, 128
POOL = SimpleNamespace(page_size=PAGE, index_head_dim=D)


def formula(queries, keys, scale, weights):
    """``[q, k]`` float64, one query and one head at a time."""
    out = torch.zeros(len(queries), len(keys), dtype=torch.float64)
    for q in range(len(queries)):
        for h in range(queries.shape[1]):
            score = keys.double() @ queries[q, h].double()
            out[q] += weights[q, h].double() * score.clamp_min(0)
        out[q] *= scale.double()
    return out


def filled_buffer(lengths, pages_in_pool=40):
    """Requests of these lengths in scattered pages of a pool of NaN codes: buffer, block tables, keys, scales."""
    buffer = torch.full((pages_in_pool, PAGE * (D + 4)), 0xFF, dtype=torch.uint8)
    free = torch.randperm(pages_in_pool).tolist()
    width = max(1, max(-(-n // PAGE) for n in lengths))
    tables = torch.full((len(lengths), width), 10**6, dtype=torch.int32)  # entries past the end must not be read
    keys, scales = [], []
    for i, n in enumerate(lengths):
        k, s = act_quant(torch.randn(n, D))
        pages = [free.pop() for _ in range(-(-n // PAGE))]
        tables[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(n)], dtype=torch.int64)
        set_k_and_s(POOL, buffer, slots, k, s)
        keys.append(k)
        scales.append(s.squeeze(1))
    return buffer, tables, keys, scales


def test_mqa_logits_is_the_formula():
    queries = act_quant(torch.randn(9, 4, D))[0].float()
    keys = act_quant(torch.randn(77, D))[0].float()
    scale, weights = torch.rand(77) + 0.1, torch.randn(9, 4)
    got = mqa_logits(queries, keys, scale, weights)
    expected = formula(queries, keys, scale, weights)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [5, 0, 200, 1]])
def test_get_returns_what_set_wrote(lengths):
    buffer, tables, keys, scales = filled_buffer(lengths)
    k, s = get_k_and_s(POOL, buffer, tables, torch.tensor(lengths), sum(lengths), max(lengths))
    assert torch.equal(k, torch.cat(keys).view(torch.uint8))
    assert torch.equal(s.view(torch.float32).squeeze(1), torch.cat(scales))


def test_set_touches_only_its_tokens():
    buffer = torch.randint(0, 256, (4, PAGE * (D + 4)), dtype=torch.uint8)
    before = buffer.clone()
    k, s = act_quant(torch.randn(1, D))
    set_k_and_s(POOL, buffer, torch.tensor([2 * PAGE + 7]), k, s)
    changed = (buffer != before).nonzero()
    assert set(changed[:, 0].tolist()) <= {2}
    token = {*range(7 * D, 8 * D), *range(PAGE * D + 7 * 4, PAGE * D + 8 * 4)}
    assert set(changed[:, 1].tolist()) <= token


@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_logits_are_the_formula_and_minus_infinity_beyond(next_n):
    lengths = [1, 64, 65, 200]
    buffer, tables, keys, scales = filled_buffer(lengths)
    queries = act_quant(torch.randn(4, next_n, 3, D))[0]
    weights = torch.randn(4 * next_n, 3)
    seen = torch.tensor([[max(1, n - next_n + 1 + j) for j in range(next_n)] for n in lengths])
    width = tables.shape[1] * PAGE + 13
    got = paged_mqa_logits(queries, buffer.view(-1, PAGE, 1, D + 4), weights, seen, tables, None, width)
    assert got.shape == (4 * next_n, width)
    for b in range(4):
        for j in range(next_n):
            row, n = got[b * next_n + j], int(seen[b, j])
            expected = formula(
                queries[b, j : j + 1].float(),
                keys[b][:n].float(),
                scales[b][:n],
                weights.view(4, next_n, 3)[b, j : j + 1],
            )[0]
            torch.testing.assert_close(row[:n].double(), expected, rtol=1e-4, atol=1e-3)
            assert (row[n:] == float("-inf")).all()


def test_paged_logits_do_not_depend_on_the_batch():
    lengths = [130, 70, 200]
    buffer, tables, _, _ = filled_buffer(lengths)
    queries, weights = act_quant(torch.randn(3, 1, 4, D))[0], torch.randn(3, 4)
    cache, seen = buffer.view(-1, PAGE, 1, D + 4), torch.tensor(lengths)
    together = paged_mqa_logits(queries, cache, weights, seen, tables, None, 256)
    for b in range(3):
        one = slice(b, b + 1)
        alone = paged_mqa_logits(queries[one], cache, weights[one], seen[one], tables[one], None, 256)
        assert torch.equal(alone[0], together[b])
