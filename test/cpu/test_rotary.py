"""rotary.py against complex multiplication, one head at a time."""

from types import SimpleNamespace

import pytest
import torch

from hisparse.cpu.rotary import deepseek_rope, rotate


def table(positions: int, r: int) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * 100.0 ** -(torch.arange(0, r, 2) / r)
    return torch.cat((angle.cos(), angle.sin()), -1)


def formula(head: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """One head of one token, pair by pair."""
    half = len(cos_sin) // 2
    out = head.double().clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = complex(head[a], head[b]) * complex(cos_sin[i], cos_sin[half + i])
        out[a], out[b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 8), (5, 8), (5, 3, 12), (5, 1, 12)])
def test_rotate(interleaved, shape):
    x, cos_sin = torch.randn(*shape), table(5, 8)
    got = rotate(x, cos_sin, interleaved)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    for t in range(5):
        for head, turned in zip(x[t].reshape(-1, shape[-1]), got[t].reshape(-1, shape[-1]), strict=True):
            torch.testing.assert_close(turned.double(), formula(head, cos_sin[t], interleaved), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("neox", [True, False])
def test_deepseek_rope_reads_the_table_at_positions(neox):
    cache, positions, offsets = table(50, 8), torch.tensor([7, 0, 31]), torch.tensor([0, 2, 1])
    layer = SimpleNamespace(cos_sin_cache=cache, is_neox_style=neox)
    query, key = torch.randn(3, 4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    for given, where in ((None, positions), (offsets, positions + offsets)):
        q, k = deepseek_rope(layer, positions, query, key, given)
        assert torch.equal(q, rotate(query, cache[where], not neox))
        assert torch.equal(k, rotate(key, cache[where], not neox))
