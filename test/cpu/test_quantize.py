"""quantize.py against the definitions, in float64."""

import pytest
import torch

from hisparse.cpu.quantize import act_quant, from_fp8, hadamard


def walsh(d: int) -> torch.Tensor:
    """Entry (i, j) is -1 to the number of one-bits that i and j share: the definition, one entry at a time."""
    return torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(d)] for i in range(d)], dtype=torch.float64)


@pytest.mark.parametrize("d", [1, 2, 64, 128])
@pytest.mark.parametrize("shape", [(5,), (3, 4)])
def test_hadamard_is_the_orthonormal_walsh_matrix(d, shape):
    x = torch.randn(*shape, d)
    torch.testing.assert_close(hadamard(x).double(), x.double() @ walsh(d) / d**0.5, rtol=1e-5, atol=1e-5)


def test_hadamard_keeps_dtype_and_products():
    q, k = torch.randn(7, 128), torch.randn(7, 128)
    torch.testing.assert_close((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-4)
    assert hadamard(q.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("d", [0, 96])
def test_hadamard_refuses_other_sizes(d):
    with pytest.raises(ValueError, match=f"{d}; it must be a power of two"):
        hadamard(torch.zeros(2, d))


def test_from_fp8_is_exact_for_every_finite_code():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    finite = expected.isfinite()
    assert finite.sum() == 254
    for x in (codes, codes.view(torch.float8_e4m3fn)):
        assert torch.equal(from_fp8(x)[finite], expected[finite])


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("magnitude", [1e-9, 1.0, 3e4])
def test_act_quant_error_is_half_an_ulp_of_the_blocks_scale(scale_fmt, magnitude):
    x = torch.randn(6, 3, 256) * magnitude
    x[0, 0] = 0
    y, scale = act_quant(x, 128, scale_fmt)
    assert (y.dtype, y.shape) == (torch.float8_e4m3fn, x.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (6, 3, 2))
    assert y.float().isfinite().all()
    s = scale.double().repeat_interleave(128, -1)
    # e4m3 has 3 mantissa bits (half an ulp is 1/16 of the value) and subnormals of 2**-9.
    bound = torch.maximum(x.double().abs() / 16, s * 2.0**-10) * 1.001
    assert ((y.double() * s - x.double()).abs() <= bound).all()


def test_act_quant_scale_formats():
    x = torch.randn(40, 128) * torch.logspace(-3, 3, 40)[:, None]
    exact = (x.double().abs().amax(-1).clamp_min(1e-4) / 448).unsqueeze(-1)
    torch.testing.assert_close(act_quant(x)[1].double(), exact, rtol=1e-6, atol=0)
    rounded = act_quant(x, 128, "ue8m0")[1].double()
    assert torch.equal(torch.frexp(rounded).mantissa, torch.full_like(rounded, 0.5)), "not a power of two"
    assert ((rounded >= exact * (1 - 1e-6)) & (rounded < 2 * exact * (1 + 1e-6))).all()


def test_act_quant_refuses_partial_blocks():
    with pytest.raises(ValueError, match="100; it must be a multiple of 128"):
        act_quant(torch.zeros(2, 100))
