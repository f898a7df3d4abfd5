"""DeepSeek-V3.2's architecture with dense MLPs, for training: parameter names are those of the checkpoint.

MLA in its plain (non-absorbed) form. The work that is per token runs on flattened tokens [B * T, ...], so that one
compilation serves every sequence length; only attention sees [B, T].
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from indexer import Indexer
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """The fields of config.json that matter here, under their names there."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Config:
        raw = json.loads((folder / "config.json").read_text())
        return cls(**{f.name: raw[f.name] for f in fields(cls)})

    def softmax_scale(self) -> float:
        """1 / sqrt(head dim), times the square of yarn's attention factor."""
        factor, weight = self.rope_scaling["factor"], self.rope_scaling["mscale_all_dim"]
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * (0.1 * weight * math.log(factor) + 1) ** 2


def yarn_frequencies(config: Config) -> Tensor:
    """float32 [rope/2] radians a position (YaRN, Peng et al. 2023, section 3.2)."""
    dim, base, scaling = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling

    def dim_with_rotations(rotations: float) -> float:
        wave = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(base))

    low = max(math.floor(dim_with_rotations(scaling["beta_fast"])), 0)
    high = min(math.ceil(dim_with_rotations(scaling["beta_slow"])), dim - 1)
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - stretched) + plain / scaling["factor"] * stretched


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (2i, 2i + 1). The result is stored as halves, which dot products do not notice."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, self.heads, self.scale = c, c.num_attention_heads, c.softmax_scale()
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, self.heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, self.heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * c.v_head_dim, c.hidden_size, bias=False)
        self.indexer = Indexer(c.hidden_size, c.q_lora_rank, c.index_n_heads, c.index_head_dim)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [N, hidden]; cos, sin [N, rope/2]

        -> queries, keys [N, heads, 192], values [N, heads, 128], q_lora [N, rank]
        """
        c = self.c
        q_lora = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_rope = (
            self.q_b_proj(q_lora).unflatten(-1, (self.heads, -1)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        k_nope, values = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, (self.heads, -1))
            .split([c.qk_nope_head_dim, c.v_head_dim], -1)
        )
        q_rope = rotate_pairs(q_rope, cos[:, None], sin[:, None])
        k_rope = rotate_pairs(k_rope, cos, sin)[:, None].expand(-1, self.heads, -1)
        return torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, k_rope], -1), values, q_lora


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        normed = self.input_layernorm(x)
        return (normed, *self.self_attn.project(normed, cos, sin))

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor | None) -> Tensor:
    """q, k [B, T, heads, 192], v [B, T, heads, 128]; allowed bool [B, T, T] or None for causal -> [B, T, heads, 128]"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if allowed is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None], scale=scale).transpose(1, 2)
    # Flash attention wants one head size for all three.
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    out = F.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=scale)
    return out[..., : v.shape[-1]].transpose(1, 2)


class Needle(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("frequencies", yarn_frequencies(config), persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= (2 * self.config.num_hidden_layers) ** -0.5
            elif name == "lm_head.weight":
                std = 0.02
            elif name.endswith("embed_tokens.weight"):
                std = 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [length, rope/2]"""
        angles = torch.arange(length, device=self.frequencies.device, dtype=torch.float32)[:, None] * self.frequencies
        return angles.cos(), angles.sin()

    def forward(
        self,
        ids: Tensor,
        top_k: int | None = None,
        *,
        fp8: bool = True,
        kl_rows: Tensor | None = None,
        kl_selected: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """ids int64 [B, T] -> final hidden states [B, T, hidden] and the indexer's loss (0 without kl_rows).

        top_k: None for dense attention. kl_rows: int64 [R] query positions at which the indexer learns; kl_selected
        limits its target to the positions it selected.
        """
        batch, length = ids.shape
        cos, sin = self.rotary(length)
        flat_cos, flat_sin = cos.repeat(batch, 1), sin.repeat(batch, 1)
        x = self.model.embed_tokens(ids.flatten())
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        loss = torch.zeros((), device=ids.device)
        for layer in self.model.layers:
            attention = layer.self_attn
            normed, *projected = layer.before(x, flat_cos, flat_sin)
            normed, q, k, v, q_lora = (part.unflatten(0, (batch, length)) for part in (normed, *projected))
            allowed = None
            if top_k is not None or kl_rows is not None:
                source, q_source = normed.detach(), q_lora.detach()
                keys = attention.indexer.keys(source, cos, sin)
            if top_k is not None:
                with torch.no_grad():
                    queries = attention.indexer.queries(source, q_source, cos[None], sin[None])
                    allowed = attention.indexer.select(*queries, keys, top_k, fp8=fp8)
            if kl_rows is not None:
                rows = attention.indexer.queries(
                    source[:, kl_rows], q_source[:, kl_rows], cos[None, kl_rows], sin[None, kl_rows]
                )
                scores = attention.indexer.scores(*rows, keys)
                limit = allowed[:, kl_rows] if allowed is not None and kl_selected else None
                loss = loss + index_loss(scores, q[:, kl_rows], k, attention.scale, kl_rows, limit)
            attended = attend(q, k, v, attention.scale, allowed)
            x = layer.after(x, attended.flatten(0, 1).flatten(1))
        return self.model.norm(x).unflatten(0, (batch, length)), loss


def index_loss(scores: Tensor, q: Tensor, k: Tensor, scale: float, rows: Tensor, allowed: Tensor | None) -> Tensor:
    """KL from the main attention, summed over heads and normalised, to the softmax of the index scores.

    scores float32 [B, R, T]; q [B, R, heads, d] and k [B, T, heads, d] are targets only: no gradient reaches them.
    """
    masked = torch.arange(k.shape[1], device=k.device) > rows[:, None]
    if allowed is not None:
        masked = masked | ~allowed
    with torch.no_grad():
        logits = torch.einsum("brhd,bthd->bhrt", q, k).float() * scale
        mask = masked if masked.dim() == 2 else masked[:, None]
        target = logits.masked_fill(mask, float("-inf")).softmax(-1).mean(1)
    predicted = scores.masked_fill(masked, float("-inf")).log_softmax(-1)
    per_row = (target * (target.clamp_min(1e-9).log() - predicted.masked_fill(masked, 0.0))).sum(-1)
    return per_row.mean()
