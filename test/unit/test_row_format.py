"""Row formats: round trips, the fp8 error bound, and the byte layout against one built by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hisparse.row_format import FP8_GROUP, FP8_MAX, SMALLEST_SCALE, Bf16Row, Fp8DsMlaRow, RowFormat

FORMATS = (Bf16Row(), Bf16Row(nope_dim=24, rope_dim=8), Fp8DsMlaRow())
formats = pytest.mark.parametrize("row_format", FORMATS, ids=repr)


def bits(tensor: torch.Tensor) -> list[int]:
    """The uint16 patterns of a bf16 tensor; unlike values they tell one NaN from another, and 0 from -0."""
    return tensor.contiguous().view(torch.int16).flatten().tolist()


def bf16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int16)).view(torch.bfloat16)


def test_sizes_of_the_models_rows() -> None:
    assert (Bf16Row().row_bytes, Fp8DsMlaRow().row_bytes) == (1152, 656)
    assert all(row_format.row_bytes % 16 == 0 for row_format in FORMATS)


@given(patterns=arrays(np.int16, (3, 32), elements=st.integers(-(2**15), 2**15 - 1)))
def test_bf16_rows_keep_every_bit(patterns: np.ndarray) -> None:
    row_format = Bf16Row(nope_dim=24, rope_dim=8)
    k = bf16(patterns)
    rows = row_format.pack(k[:, :24], k[:, 24:])
    assert (rows.dtype, rows.shape) == (torch.uint8, (3, 64))
    assert rows.numpy().tobytes() == patterns.astype("<i2").tobytes()
    k_nope, k_rope = row_format.unpack(rows)
    assert bits(k_nope) == bits(k[:, :24])
    assert bits(k_rope) == bits(k[:, 24:])


def test_every_bf16_pattern_survives_nan_payloads_too() -> None:
    patterns = bf16(np.arange(-(2**15), 2**15).reshape(-1, 32))
    row_format = Bf16Row(nope_dim=24, rope_dim=8)
    parts = row_format.unpack(row_format.pack(patterns[:, :24], patterns[:, 24:]))
    assert bits(torch.cat(parts, -1)) == bits(patterns)


@st.composite
def latents(draw: st.DrawFn) -> torch.Tensor:
    """bf16 [n, 512]: each group of 128 has its own magnitude, from nothing to the edge of bf16, or mixes several."""
    n = draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    exponents = st.one_of(st.sampled_from((-133, -126, -20, 0, 20, 127)), st.integers(-133, 127))
    groups = []
    for _ in range(n * 512 // FP8_GROUP):
        group = torch.randn(FP8_GROUP, generator=generator).clamp(-0.99, 0.99).double() * 2.0 ** draw(exponents)
        kind = draw(st.sampled_from(("plain", "zero", "mixed", "sparse")))
        if kind == "zero":
            group = group * 0
        elif kind == "mixed":
            group = group * 2.0 ** -torch.randint(0, 40, (FP8_GROUP,), generator=generator).double()
        elif kind == "sparse":
            group = group * (torch.rand(FP8_GROUP, generator=generator) < 0.05)
        groups.append(group)
    return torch.stack(groups).reshape(n, 512).bfloat16()


@given(k_nope=latents())
@settings(max_examples=150)
def test_fp8_error_is_within_the_bound_of_the_docstring(k_nope: torch.Tensor) -> None:
    row_format = Fp8DsMlaRow()
    k_rope = torch.randn(len(k_nope), 64).bfloat16()
    unpacked, rope = row_format.unpack(row_format.pack(k_nope, k_rope))
    assert bits(rope) == bits(k_rope)
    exact, result = k_nope.double(), unpacked.double()
    largest = exact.abs().unflatten(-1, (-1, FP8_GROUP)).amax(-1)
    scale = (largest / FP8_MAX).repeat_interleave(FP8_GROUP, -1)
    vanishing = scale < SMALLEST_SCALE
    # 2**-149 is float32's smallest step, so the largest error of such a scale, times FP8_MAX.
    assert bool((result.abs() <= largest.repeat_interleave(FP8_GROUP, -1) * 1.01 + 2.0**-140)[vanishing].all())
    # bf16's own rounding: 2**-9 of a normal result, half of its smallest subnormal (2**-133) below that.
    bound = torch.maximum(exact.abs() * 2**-4, scale * 2**-10) + result.abs() * 2**-9 + 2.0**-134
    excess = ((result - exact).abs() - bound - 1e-6 * scale * FP8_MAX)[~vanishing]
    assert bool((excess <= 0).all()), f"off by {excess.max()} more than the bound"


@pytest.mark.parametrize("largest", (2.0**-133, 1e-38, 1.3e-36, 5.2e-36, 5.4e-36, 1e-30))
def test_a_group_of_vanishing_values_makes_no_nan(largest: float) -> None:
    """The inverse of a scale below 2**-128 is infinite in float32, and its product with a zero NaN."""
    k_nope, k_rope = torch.zeros(1, 512).bfloat16(), torch.zeros(1, 64).bfloat16()
    k_nope[0, 3], k_nope[0, 5] = largest, -largest / 2
    result = Fp8DsMlaRow().unpack(Fp8DsMlaRow().pack(k_nope, k_rope))[0]
    assert not bool(result.isnan().any())
    assert bool(((result - k_nope).abs() <= 5.3e-36).all())


def e4m3(byte: int) -> float:
    """The value of a float8_e4m3fn pattern, from its definition: 4 exponent bits (bias 7), 3 mantissa bits."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


def test_fp8_layout_byte_by_byte() -> None:
    """512 values, 4 little-endian float32 scales at 512, 64 bf16 at 528. Values that e4m3 holds exactly, scaled."""
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F and byte != 0x80]
    generator = torch.Generator().manual_seed(5)
    scales = (1.0, 2.0**-3, 2.0**10, 2.0**-20)
    stored, latent = bytearray(), []
    for scale in scales:
        chosen = [finite[i] for i in torch.randint(0, len(finite), (FP8_GROUP,), generator=generator).tolist()]
        chosen[7] = 0x7E  # 448, so that the scale is exact
        stored += bytes(chosen)
        latent += [e4m3(byte) * scale for byte in chosen]
    rope = torch.randn(1, 64, generator=generator).bfloat16()
    by_hand = bytes(stored) + struct.pack("<4f", *scales) + np.array(bits(rope), "<i2").tobytes()
    assert len(by_hand) == 656

    row_format = Fp8DsMlaRow()
    k_nope = torch.tensor([latent]).bfloat16()
    assert k_nope.tolist() == [latent], "the test's values are exact in bf16"
    assert row_format.pack(k_nope, rope).numpy().tobytes() == by_hand
    unpacked, unpacked_rope = row_format.unpack(torch.frombuffer(bytearray(by_hand), dtype=torch.uint8).unsqueeze(0))
    assert unpacked.tolist() == [latent]
    assert bits(unpacked_rope) == bits(rope)


def test_fp8_groups_do_not_touch_each_other() -> None:
    row_format = Fp8DsMlaRow()
    k_nope, k_rope = torch.randn(1, 512).bfloat16(), torch.randn(1, 64).bfloat16()
    changed = k_nope.clone()
    changed[0, 130] = 1000.0
    before, after = row_format.pack(k_nope, k_rope)[0], row_format.pack(changed, k_rope)[0]
    differing = set((before != after).nonzero().flatten().tolist())
    assert differing <= {*range(128, 256), *range(516, 520)}
    assert differing & set(range(516, 520))


@formats
def test_rows_of_no_tokens(row_format: RowFormat) -> None:
    rows = row_format.pack(
        torch.zeros(0, row_format.nope_dim).bfloat16(), torch.zeros(0, row_format.rope_dim).bfloat16()
    )
    assert rows.shape == (0, row_format.row_bytes)
    k_nope, k_rope = row_format.unpack(rows)
    assert (k_nope.shape, k_rope.shape) == ((0, row_format.nope_dim), (0, row_format.rope_dim))


@formats
def test_a_middle_dimension_of_one_is_accepted_and_strides_do_not_matter(row_format: RowFormat) -> None:
    k = torch.randn(4, row_format.nope_dim + row_format.rope_dim).bfloat16()
    k_nope, k_rope = k.split((row_format.nope_dim, row_format.rope_dim), dim=-1)  # strided views of one tensor
    rows = row_format.pack(k_nope, k_rope)
    assert torch.equal(row_format.pack(k_nope.contiguous().unsqueeze(1), k_rope.contiguous().unsqueeze(1)), rows)
    one_by_one = [row_format.pack(k_nope[i : i + 1], k_rope[i : i + 1]) for i in range(4)]
    assert torch.equal(torch.cat(one_by_one), rows)


@formats
def test_wrong_parts_are_named(row_format: RowFormat) -> None:
    k_nope, k_rope = torch.zeros(2, row_format.nope_dim).bfloat16(), torch.zeros(2, row_format.rope_dim).bfloat16()
    with pytest.raises(TypeError, match=r"k_nope must be bfloat16, got torch\.float32"):
        row_format.pack(k_nope.float(), k_rope)
    with pytest.raises(TypeError, match=r"k_rope must be bfloat16, got torch\.float16"):
        row_format.pack(k_nope, k_rope.half())
    with pytest.raises(ValueError, match=rf"k_nope must hold 2 x {row_format.nope_dim} values"):
        row_format.pack(k_nope[:, 1:], k_rope)
    with pytest.raises(ValueError, match=rf"k_rope must hold 2 x {row_format.rope_dim} values"):
        row_format.pack(k_nope, k_rope[:1])


@formats
def test_wrong_rows_are_named(row_format: RowFormat) -> None:
    rows = torch.zeros(2, row_format.row_bytes, dtype=torch.uint8)
    legal = rf"rows must be uint8 \[n, {row_format.row_bytes}\]"
    with pytest.raises(ValueError, match=legal):
        row_format.unpack(rows.view(torch.int8))
    with pytest.raises(ValueError, match=legal):
        row_format.unpack(rows[:, 16:])


@pytest.mark.parametrize(("nope_dim", "rope_dim"), ((512, 63), (0, 64), (64, 0), (-64, 128), (5, 1)))
def test_bf16_dimensions_must_make_multiples_of_16_bytes(nope_dim: int, rope_dim: int) -> None:
    with pytest.raises(ValueError, match=f"nope_dim={nope_dim}, rope_dim={rope_dim}"):
        Bf16Row(nope_dim=nope_dim, rope_dim=rope_dim)
