"""The indexer's Hadamard rotation and its fp8 activation quantisation."""

from functools import lru_cache

import torch

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn value."""

AMAX_FLOOR = 1e-4
"""Lower bound of a block's largest magnitude, so that an all-zero block has a finite scale. Same value as the GPU
kernel's.
"""


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, in natural (Sylvester) order.

    Args:
        x: ``[..., d]`` floating point, ``d`` a power of two.

    Returns:
        ``x @ H / sqrt(d)`` in ``x``'s shape and dtype, computed in float32.

    Raises:
        ValueError: ``d`` is not a power of two.
    """
    d = x.shape[-1]
    if d <= 0 or d & (d - 1):
        raise ValueError(f"hadamard: the last dimension is {d}; it must be a power of two")
    # One product with the matrix: ten times faster at decode sizes than seven butterfly stages of small tensor
    # operations.
    return (x.float() @ _hadamard_matrix(d) * d**-0.5).to(x.dtype)


@lru_cache(maxsize=4)
def _hadamard_matrix(d: int) -> torch.Tensor:
    """``[d, d]`` of 1 and -1, float32: entry (i, j) is negative if i and j have an odd number of one-bits in common."""
    matrix = torch.ones(1, 1)
    while len(matrix) < d:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def from_fp8(x: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn to float32, exactly, for finite values (the two NaN codes come out as +-480).

    Twelve times faster than ``x.float()``, which converts one value at a time. The fp8 code's exponent and mantissa,
    shifted to a half's, are that half with an exponent bias of 15 in place of 7, hence the factor 2**8; subnormals
    included.
    """
    half = x.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return half.view(torch.float16).float().mul_(2.0**8)


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-wise quantisation to float8_e4m3fn, as DeepSeek-V3.2's indexer applies it to queries and keys.

    Args:
        x: ``[..., n]`` floating point, ``n`` a multiple of ``block_size``.
        block_size: values that share one scale.
        scale_fmt: None for exact scales ``amax / 448``; any other value (the checkpoints say "ue8m0") rounds the scale
            up to a power of two.

    Returns:
        ``(y, scale)``: ``y`` float8_e4m3fn in ``x``'s shape, ``scale`` float32 ``[..., n / block_size]``; ``x ~ y *
        scale``.

    Raises:
        ValueError: ``n`` is not a multiple of ``block_size``.
    """
    if x.shape[-1] % block_size:
        raise ValueError(f"act_quant: the last dimension is {x.shape[-1]}; it must be a multiple of {block_size}")
    blocks = x.float().unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(-1).clamp_min(AMAX_FLOOR) * (1.0 / FP8_MAX)
    if scale_fmt is not None:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    y = (blocks / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return y.flatten(-2).to(torch.float8_e4m3fn), scale
