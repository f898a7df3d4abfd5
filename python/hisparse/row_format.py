"""Row formats: how the KV of one token in one layer lies in bytes.

A row is what the host pool stores, what swap-in copies and what attention reads; nothing else in the package
looks inside it. A new format is a new subclass of `RowFormat` here and a packing branch in the CUDA store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn value."""

FP8_GROUP = 128
"""Values of the latent that share one scale in an `fp8_ds_mla` row."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. The inverse of a smaller scale may be infinite."""


class RowFormat(ABC):
    """One token's latent (`k_nope`) and rotary key (`k_rope`) as `row_bytes` bytes, a multiple of 16."""

    name: str
    nope_dim: int
    rope_dim: int
    row_bytes: int

    @abstractmethod
    def pack(self, k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
        """Rows of tokens: bf16 [n, nope_dim] and [n, rope_dim] -> uint8 [n, row_bytes]."""

    @abstractmethod
    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse up to quantisation: uint8 [n, row_bytes] -> bf16 [n, nope_dim], [n, rope_dim]."""

    def _check_parts(self, k_nope: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = k_nope.shape[0]
        parts = []
        for label, part, dim in (("k_nope", k_nope, self.nope_dim), ("k_rope", k_rope, self.rope_dim)):
            if part.dtype != torch.bfloat16:
                raise TypeError(f"{label} must be bfloat16, got {part.dtype}")
            if part.numel() != n * dim:
                raise ValueError(f"{label} must hold {n} x {dim} values, got shape {tuple(part.shape)}")
            parts.append(part.reshape(n, dim).contiguous())
        return parts[0], parts[1]

    def _check_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype != torch.uint8 or rows.shape[-1] != self.row_bytes:
            raise ValueError(f"rows must be uint8 [n, {self.row_bytes}], got {rows.dtype} {tuple(rows.shape)}")
        return rows.contiguous()


@dataclass(frozen=True)
class Bf16Row(RowFormat):
    """`nope_dim` bf16 values, then `rope_dim` bf16 values: 1,152 B for DeepSeek-V3.2. Lossless."""

    nope_dim: int = 512
    rope_dim: int = 64
    name = "bf16"

    def __post_init__(self) -> None:
        if self.nope_dim <= 0 or self.rope_dim <= 0 or self.row_bytes % 16:
            raise ValueError(
                f"a bf16 row needs positive dimensions that add up to a multiple of 8, "
                f"got nope_dim={self.nope_dim}, rope_dim={self.rope_dim}"
            )

    @property
    def row_bytes(self) -> int:  # type: ignore[override]
        return 2 * (self.nope_dim + self.rope_dim)

    def pack(self, k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._check_parts(k_nope, k_rope), dim=-1).view(torch.uint8)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._check_rows(rows).view(torch.bfloat16)
        return values[:, : self.nope_dim], values[:, self.nope_dim :]


@dataclass(frozen=True)
class Fp8DsMlaRow(RowFormat):
    """FlashMLA's fp8 layout, 656 B: 512 float8_e4m3fn values, 4 float32 scales, 64 bf16 rotary values.

    Each group of 128 values has the scale `max|x| / 448`, and a value is stored as `x * (1 / scale)`. The
    rounding error of a normal e4m3 value is at most 2**-4 of it; below the smallest normal (2**-6) it is at most
    2**-10, so after unpacking |error| <= max(|x| * 2**-4, scale * 2**-10), plus bf16 rounding (2**-9 of the
    result). A group whose scale is below SMALLEST_SCALE (no value above 5.3e-36) may
    unpack to its largest value throughout, as SGLang's own store does: infinity times the value, clamped.
    """

    name = "fp8_ds_mla"
    nope_dim = 512
    rope_dim = 64
    row_bytes = 512 + 4 * (512 // FP8_GROUP) + 2 * 64

    def pack(self, k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
        k_nope, k_rope = self._check_parts(k_nope, k_rope)
        groups = k_nope.float().unflatten(-1, (-1, FP8_GROUP))
        # A tensor, not a Python number: CUDA would turn division by a number into multiplication by its inverse.
        fp8_max = torch.tensor(FP8_MAX, device=groups.device)
        scales = groups.abs().amax(-1) / fp8_max
        inverse = torch.where(scales > 0, 1.0 / scales, torch.zeros_like(scales))
        # Infinity times 0: the clamp of SGLang's store takes the minimum first, which turns NaN into FP8_MAX.
        scaled = (groups * inverse.unsqueeze(-1)).nan_to_num(nan=FP8_MAX)
        values = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        parts = (values.flatten(-2), scales.contiguous(), k_rope)
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nope, scales, rope = self._check_rows(rows).split((512, 16, 128), dim=-1)
        groups = nope.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, FP8_GROUP))
        values = groups * scales.contiguous().view(torch.float32).unsqueeze(-1)
        return values.flatten(-2).to(torch.bfloat16), rope.contiguous().view(torch.bfloat16)
