"""DSA's indexer (DeepSeek-V3.2-Exp report, section 2.1): which positions a query may attend to.

    score[q, t] = sum over heads h of  w[q, h] * relu(query[q, h] . key[t]),
    w = weights_proj(x) / sqrt(n_heads * head_dim)

Served models round queries and keys to fp8 (e4m3, one power-of-two scale a vector) after a Hadamard rotation;
`fp8=True` does the same here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FP8_MAX = 448.0
SCORE_BYTES_MAX = 1 << 30  # of one block of per-head scores


def hadamard(size: int, device: torch.device) -> Tensor:
    """Orthogonal, symmetric Hadamard matrix [size, size] in Sylvester's order."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def round_fp8(x: Tensor) -> Tensor:
    """x [..., head_dim] rotated, then rounded to e4m3 with one power-of-two scale a vector; same shape and dtype."""
    rotated = (x.float() @ hadamard(x.shape[-1], x.device)).to(torch.bfloat16).float()
    scale = torch.exp2(torch.ceil(torch.log2(rotated.abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX)))
    rounded = (rotated / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale
    return rounded.to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first 2 * cos.shape[-1] dimensions, pairs (i, i + half); the rest passes through."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], -1)


class Indexer(nn.Module):
    def __init__(self, hidden_size: int, q_lora_rank: int, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, head_dim
        self.wq_b = nn.Linear(q_lora_rank, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(hidden_size, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(hidden_size, n_heads, bias=False)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, hidden], cos and sin [T, rope/2] -> [B, T, head_dim]"""
        normed = F.layer_norm(
            self.wk(x).float(), (self.head_dim,), self.k_norm.weight.float(), self.k_norm.bias.float(), self.k_norm.eps
        )
        return rotate_halves(normed.to(torch.promote_types(x.dtype, torch.bfloat16)), cos, sin)

    def queries(self, x: Tensor, q_lora: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, R, hidden], q_lora [B, R, rank], cos and sin [B or 1, R, rope/2]

        -> queries [B, R, heads, head_dim], head weights float32 [B, R, heads]
        """
        queries = self.wq_b(q_lora).unflatten(-1, (self.n_heads, self.head_dim))
        queries = rotate_halves(queries, cos[:, :, None], sin[:, :, None])
        weights = self.weights_proj(x).float() * (self.n_heads * self.head_dim) ** -0.5
        return queries, weights

    @staticmethod
    def scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """-> float32 [B, R, T], without the causal mask"""
        batch, rows, heads, dim = queries.shape
        with torch.autocast(queries.device.type, enabled=False):  # bf16 sums over heads would make ties
            dots = torch.bmm(queries.reshape(batch, rows * heads, dim), keys.transpose(1, 2)).relu()
            dots = dots.view(batch * rows, heads, -1).float()
            return torch.bmm(weights.reshape(batch * rows, 1, heads), dots).view(batch, rows, -1)

    @torch.no_grad()
    def select(self, queries: Tensor, weights: Tensor, keys: Tensor, top_k: int, *, fp8: bool) -> Tensor:
        """bool [B, T, T]: True where query position (dim 1) may attend to key position (dim 2); causal."""
        batch, length, heads, _ = queries.shape
        if length <= top_k:
            return torch.ones(length, length, dtype=torch.bool, device=queries.device).tril().expand(batch, -1, -1)
        if fp8:
            queries, keys = round_fp8(queries), round_fp8(keys)
        allowed = torch.zeros(batch, length, length, dtype=torch.bool, device=queries.device)
        block = max(1, SCORE_BYTES_MAX // (batch * heads * length * 4))
        for start in range(0, length, block):
            end = min(start + block, length)
            scores = self.scores(queries[:, start:end], weights[:, start:end], keys[:, :end])
            future = torch.ones(end - start, end, dtype=torch.bool, device=scores.device).triu(start + 1)
            scores.masked_fill_(future, float("-inf"))
            best = scores.topk(min(top_k, end), dim=-1, sorted=False).indices
            # Rows with fewer than top_k positions also "select" masked ones; the causal mask takes them out again.
            allowed[:, start:end, :end] = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & ~future
        return allowed
