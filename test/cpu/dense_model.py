"""The architecture of DeepSeek-V3.2 in float32, one request at a time, straight from the weights: an oracle for the
server.

No cache, no pages, no fp8, no Hadamard rotation (it leaves products unchanged), every head expanded instead of
absorbed.
"""

import math
from typing import Any

import torch


class DenseModel:
    """``weights``: the checkpoint's tensors by name; ``config``: its config.json. Dense layers only."""

    def __init__(self, weights: dict[str, torch.Tensor], config: dict[str, Any]):
        self.w = {name: tensor.float() for name, tensor in weights.items()}
        self.c = config

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """``[len(tokens), vocab]`` float32."""
        c, w = self.c, self.w
        x = w["model.embed_tokens.weight"][tokens]
        self.selected: list[torch.Tensor] = []
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            h = self._rms(x, prefix + "input_layernorm")
            x = x + self._attention(h, prefix + "self_attn.")
            h = self._rms(x, prefix + "post_attention_layernorm")
            gate, up, down = (w[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
        return self._rms(x, "model.norm") @ w["lm_head.weight"].T

    def _rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.w[name + ".weight"]

    def _attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        c = self.c
        w = {
            name.removeprefix(prefix).removesuffix(".weight"): t
            for name, t in self.w.items()
            if name.startswith(prefix)
        }
        heads, nope, rope, value = (
            c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        n, rank = len(x), c["kv_lora_rank"]
        q_latent = self._rms(x @ w["q_a_proj"].T, prefix + "q_a_layernorm")
        q = (q_latent @ w["q_b_proj"].T).view(n, heads, nope + rope)
        kv = x @ w["kv_a_proj_with_mqa"].T
        latent = self._rms(kv[:, :rank], prefix + "kv_a_layernorm")
        k_rope = self._rotate(kv[:, None, rank:], interleaved=True)
        q_rope = self._rotate(q[..., nope:], interleaved=True)
        k_v = (latent @ w["kv_b_proj"].T).view(n, heads, nope + value)
        scores = torch.einsum("qhd,khd->hqk", q[..., :nope], k_v[..., :nope])
        scores += torch.einsum("qhd,kd->hqk", q_rope, k_rope[:, 0])
        mscale = 0.1 * c["rope_scaling"]["mscale_all_dim"] * math.log(c["rope_scaling"]["factor"]) + 1
        scores *= (nope + rope) ** -0.5 * mscale**2
        keep = self._select(x, q_latent, w)
        self.selected.append(keep)
        weights = torch.softmax(scores.masked_fill(~keep, float("-inf")), -1)
        out = torch.einsum("hqk,khd->qhd", weights, k_v[..., nope:])
        return out.reshape(n, -1) @ w["o_proj"].T

    def _select(self, x: torch.Tensor, q_latent: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        """``[n, n]``: whether the query (row) may attend to the key."""
        c, n = self.c, len(x)
        heads, d, rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        q = (q_latent @ w["indexer.wq_b"].T).view(n, heads, d)
        k = torch.nn.functional.layer_norm(
            x @ w["indexer.wk"].T, (d,), w["indexer.k_norm"], w["indexer.k_norm.bias"], 1e-6
        )
        q = torch.cat((self._rotate(q[..., :rope], interleaved=False), q[..., rope:]), -1)
        k = torch.cat((self._rotate(k[:, None, :rope], interleaved=False)[:, 0], k[:, rope:]), -1)
        gates = x @ w["indexer.weights_proj"].T * heads**-0.5 * d**-0.5
        logits = torch.einsum("qh,qhk->qk", gates, torch.einsum("qhd,kd->qhk", q, k).relu())
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        logits = logits.masked_fill(~causal, float("-inf"))
        keep = torch.zeros(n, n, dtype=torch.bool)
        best = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, : c["index_topk"]]
        return keep.scatter_(1, best, True) & causal

    def _rotate(self, x: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """``[n, heads, r]`` at positions 0 .. n - 1, YaRN's frequencies (Peng et al. 2023, section 3)."""
        c, r = self.c, x.shape[-1]
        scaling, base = c["rope_scaling"], c["rope_theta"]
        inv = base ** -(torch.arange(0, r, 2, dtype=torch.float64) / r)

        def dimension(rotations: float) -> float:
            return (
                r
                * math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi))
                / (2 * math.log(base))
            )

        low = max(math.floor(dimension(scaling["beta_fast"])), 0)
        high = min(math.ceil(dimension(scaling["beta_slow"])), r - 1)
        ramp = ((torch.arange(r // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
        inv = inv * (1 - ramp) + inv / scaling["factor"] * ramp
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * inv
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        if interleaved:
            pairs = torch.complex(x[..., 0::2].double(), x[..., 1::2].double()) * turn
            return torch.stack((pairs.real, pairs.imag), -1).flatten(-2).float()
        pairs = torch.complex(x[..., : r // 2].double(), x[..., r // 2 :].double()) * turn
        return torch.cat((pairs.real, pairs.imag), -1).float()
