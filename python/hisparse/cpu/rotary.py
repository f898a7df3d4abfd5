"""Rotary position embedding from a precomputed cos/sin table (YaRN's scaling is in the table)."""

from typing import Any

import torch


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the leading dimensions of every head by its token's angles.

    Args:
        x: ``[tokens, ..., head_size]``; the leading ``r`` values of a head are rotated, the rest pass through.
        cos_sin: ``[tokens, r]``: ``r / 2`` cosines, then ``r / 2`` sines.
        interleaved: pairs are ``(0, 1), (2, 3), ...`` (GPT-J, DeepSeek's attention), else ``(0, r/2), (1, r/2 + 1),
            ...`` (NeoX).

    Returns:
        ``x``'s shape and dtype, computed in float32.
    """
    tokens, r = cos_sin.shape
    heads = x.reshape(tokens, -1, x.shape[-1])
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
    part = heads[..., :r].float()
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = part.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), heads[..., r:]), dim=-1).view(x.shape)


def deepseek_rope(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``DeepseekScalingRotaryEmbedding.forward_native`` for queries and keys with or without a head dimension."""
    where = positions if offsets is None else positions + offsets
    cos_sin = self.cos_sin_cache[where.flatten()]
    interleaved = not self.is_neox_style
    return rotate(query, cos_sin, interleaved), rotate(key, cos_sin, interleaved)
