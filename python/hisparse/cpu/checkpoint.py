"""Makes a small random checkpoint of DeepSeek-V3.2's architecture, with a byte-level tokenizer, for tests and the demo.

    python -m hisparse.cpu.checkpoint DIR [--layers 4] [--index-topk 256] [--style plain]

Two styles:

- ``plain``: simply random weights. Attention weighs the tokens at the edge of the selection as heavily as any other, so
one
  flipped token moves the logits; and selections jump about from step to step, so a hot buffer misses a lot.
- ``conditioned``: indexer and attention agree on which tokens matter, so those at the edge hardly count. Outputs are
stable under
  small changes of the selection, and selections overlap from step to step, as in trained models. See ``_Conditioned``.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from hisparse.cpu import byte_tokenizer

Style = Literal["conditioned", "plain"]

ROPE_DIM = 64
INDEX_HEAD_DIM = 128  # SGLang's pool asserts it
CONTEXT_LEN = 163_840
YARN_FACTOR = 40


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, in the checkpoint's own terms. The defaults run on any machine."""

    layers: int = 2
    hidden: int = 256
    heads: int = 4
    index_topk: int = 64
    index_heads: int = 4
    kv_lora_rank: int = 128
    q_lora_rank: int = 128
    nope_dim: int = 64
    value_dim: int = 64
    intermediate: int = 256
    experts: int = 0
    vocab: int = 320

    def __post_init__(self) -> None:
        if self.vocab < byte_tokenizer.TOKENS:
            raise ValueError(f"vocab is {self.vocab}; the tokenizer needs at least {byte_tokenizer.TOKENS}")
        if self.experts and self.experts < 4:
            raise ValueError(f"experts is {self.experts}; legal: 0 (dense layers only) or at least 4")
        if self.kv_lora_rank <= self.value_dim:
            raise ValueError(f"kv_lora_rank is {self.kv_lora_rank}; legal: more than value_dim, {self.value_dim}")
        if 64 % self.heads:
            raise ValueError(f"heads is {self.heads}; legal: divisors of 64, which SGLang pads to on a GPU")

    def config(self) -> dict[str, Any]:
        """The ``config.json`` that SGLang and transformers read."""
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.intermediate // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_routed_experts": self.experts or 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1 if self.experts else self.layers,
            "moe_layer_freq": 1,
            "kv_lora_rank": self.kv_lora_rank,
            "q_lora_rank": self.q_lora_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": ROPE_DIM,
            "v_head_dim": self.value_dim,
            "index_n_heads": self.index_heads,
            "index_head_dim": INDEX_HEAD_DIM,
            "index_topk": self.index_topk,
            "max_position_embeddings": CONTEXT_LEN,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": YARN_FACTOR,
                "original_max_position_embeddings": CONTEXT_LEN // YARN_FACTOR,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "num_nextn_predict_layers": 0,
            "bos_token_id": byte_tokenizer.BOS,
            "eos_token_id": byte_tokenizer.EOS,
            "pad_token_id": byte_tokenizer.PAD,
        }


class _Plain:
    """Random weights: every matrix has independent normal entries that keep the scale of its input."""

    def __init__(self, shape: Shape, seed: int):
        self.shape = shape
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator)

    def norm(self, n: int) -> torch.Tensor:
        return 1 + 0.1 * self.normal(n)

    def embedding(self) -> torch.Tensor:
        return self.normal(self.shape.vocab, self.shape.hidden)

    def reader(self, outputs: int) -> torch.Tensor:
        """A matrix that reads the hidden state."""
        return self.normal(outputs, self.shape.hidden) / self.shape.hidden**0.5

    def writer(self, inputs: int, gain: float) -> torch.Tensor:
        """A matrix that writes into the hidden state."""
        return self.normal(self.shape.hidden, inputs) * (gain / inputs**0.5)

    def head(self) -> torch.Tensor:
        """``lm_head``: zero rows for all tokens but printable ASCII and newline, so that greedy output is readable and
        endless.
        """
        rows = self.reader(self.shape.vocab) * 2
        readable = torch.zeros(self.shape.vocab, 1)
        readable[[10, *range(32, 127)]] = 1
        return rows * readable

    def attention(self) -> dict[str, torch.Tensor]:
        s = self.shape
        q, kv = s.q_lora_rank, s.kv_lora_rank
        return {
            "q_a_proj": self.reader(q),
            "q_b_proj": self.normal(s.heads * (s.nope_dim + ROPE_DIM), q) * (1.5 / q**0.5),
            "kv_a_proj_with_mqa": self.reader(kv + ROPE_DIM),
            "kv_b_proj": self.normal(s.heads * (s.nope_dim + s.value_dim), kv) * (1.5 / kv**0.5),
            "o_proj": self.writer(s.heads * s.value_dim, 4.0),
            "indexer.wq_b": self.normal(s.index_heads * INDEX_HEAD_DIM, q) / q**0.5,
            "indexer.wk": self.reader(INDEX_HEAD_DIM),
            "indexer.weights_proj": self.reader(s.index_heads),
        }


class _Conditioned(_Plain):
    """Random weights in which every token has an importance that indexer and attention agree on.

    Two directions of the hidden state are reserved, orthogonal unit vectors. Along ``constant`` every token's embedding
    has the same component, sqrt(hidden); along ``importance`` it has a standard normal component z of its own. No layer
    writes to either, so they survive to the last layer, and only the matrices below read them.

    The constant gives every query the same component, and every key a component z. Added to it is a constant in the
    rotary parts of query and key; after rotation by positions its product is a mean of cosines of the distance, one per
    rotary frequency, which falls off roughly with the distance's logarithm. So

        attention logit ~ Z_WEIGHT * z + NEAR_WEIGHT * nearness(distance) + noise,    indexer logit ~ the same order.

    With only a hundred tokens to say, such a model would repeat itself at once. So head 0 of every layer echoes what it
    attends to into a third subspace, and ``lm_head`` scores a token lower the more of it is found there.
    """

    Z_WEIGHT = 2.0
    NEAR_WEIGHT = 8.0
    NOISE = 0.6
    ECHO = 4.0
    ECHO_NEARNESS = 3.0
    ECHO_PENALTY = 0.15

    def __init__(self, shape: Shape, seed: int):
        super().__init__(shape, seed)
        basis, _ = torch.linalg.qr(self.normal(shape.hidden, 2 + shape.value_dim))
        self.constant, self.importance, self.echo = basis[:, 0], basis[:, 1], basis[:, 2:]
        # RMSNorm of an embedding divides by sqrt(2): one half of its square is the constant's.
        self.read_constant = self.constant * (2 / shape.hidden) ** 0.5  # gives 1
        self.read_importance = self.importance * 2**0.5  # gives z

    def norm(self, n: int) -> torch.Tensor:
        return torch.ones(n)

    def embedding(self) -> torch.Tensor:
        table = super().embedding()
        table -= torch.outer(table @ self.constant, self.constant)
        self.said = table @ self.echo @ self.echo.T  # what is echoed when a token is attended to
        return table + self.constant * self.shape.hidden**0.5

    def head(self) -> torch.Tensor:
        rows = super().head()
        return torch.where((rows != 0).any(1, keepdim=True), rows - self.ECHO_PENALTY * self.said, rows)

    def reader(self, outputs: int) -> torch.Tensor:
        matrix = super().reader(outputs)
        return matrix - torch.outer(matrix @ self.constant, self.constant)

    def writer(self, inputs: int, gain: float) -> torch.Tensor:
        matrix = super().writer(inputs, gain)
        for direction in (self.constant, self.importance):
            matrix -= torch.outer(direction, direction @ matrix)
        return matrix

    def attention(self) -> dict[str, torch.Tensor]:
        s = self.shape
        w = super().attention()
        nope, value, heads = s.nope_dim, s.value_dim, s.heads

        # Latent 0 of the query is the constant 8, of the key z; both latents are divided by their RMS.
        q_rms = math.sqrt((64 + (s.q_lora_rank - 1) / 2) / s.q_lora_rank)
        kv_rms = math.sqrt((1 + (s.kv_lora_rank - 1) / 2) / s.kv_lora_rank)
        w["q_a_proj"][0] = 8 * self.read_constant
        w["kv_a_proj_with_mqa"][0] = self.read_importance
        one = q_rms / 8  # weight of latent 0 that gives 1

        q = w["q_b_proj"].mul_(self.NOISE / 1.5).view(heads, nope + ROPE_DIM, -1)
        k = w["kv_b_proj"].div_(1.5).view(heads, nope + value, -1)
        logit_scale = (nope + ROPE_DIM) ** -0.5 * (0.1 * math.log(YARN_FACTOR) + 1) ** 2
        q[:, 0] = 0
        q[:, 0, 0] = self.Z_WEIGHT / logit_scale * one
        k[:, 0] = 0
        k[:, 0, 0] = kv_rms
        k[:, nope:, 0] = 0  # values do not see z
        pairs = ROPE_DIM // 2
        even = slice(0, ROPE_DIM, 2)  # attention rotates neighbours: a constant in each pair's first value
        q[:, nope:][:, even, 0] += self.NEAR_WEIGHT / logit_scale / pairs * one
        w["kv_a_proj_with_mqa"][s.kv_lora_rank :][even] += self.read_constant

        # The indexer rotates value i with value i + 32 of the leading 64; component 100 lies outside.
        wq = w["indexer.wq_b"].mul_(0.1).view(s.index_heads, INDEX_HEAD_DIM, -1)
        wq[:, 100] = 0
        wq[:, 100, 0] = self.Z_WEIGHT * one
        wq[:, :pairs, 0] += self.NEAR_WEIGHT / pairs * one
        w["indexer.wk"][100] = self.read_importance
        w["indexer.wk"][:pairs] += self.read_constant
        w["indexer.weights_proj"] = self.read_constant.expand(s.index_heads, -1).clone()
        w["o_proj"] *= 1.5 / 4.0

        q[0, 0] = 0  # head 0 looks at what is near and nowhere else
        q[0, nope:, 0][even] *= self.ECHO_NEARNESS
        echo = slice(1, 1 + value)  # latents that carry the echo subspace to head 0's values
        w["kv_a_proj_with_mqa"][echo] = self.echo.T
        k[0, nope:] = 0
        k[0, nope:, echo] = kv_rms * torch.eye(value)
        w["o_proj"][:, :value] = self.ECHO * self.echo
        return w


def weights(shape: Shape, style: Style = "conditioned", seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by name; bfloat16, but for the router's bias.

    Raises:
        ValueError: unknown ``style``.
    """
    if style not in ("conditioned", "plain"):
        raise ValueError(f"style is {style!r}; legal: conditioned, plain")
    make = (_Conditioned if style == "conditioned" else _Plain)(shape, seed)
    tensors = {"model.embed_tokens.weight": make.embedding()}

    def mlp(prefix: str, width: int) -> None:
        tensors[prefix + "gate_proj.weight"] = make.reader(width)
        tensors[prefix + "up_proj.weight"] = make.reader(width)
        tensors[prefix + "down_proj.weight"] = make.writer(width, 1.0)

    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = make.norm(shape.hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = make.norm(shape.hidden)
        tensors[prefix + "self_attn.q_a_layernorm.weight"] = make.norm(shape.q_lora_rank)
        tensors[prefix + "self_attn.kv_a_layernorm.weight"] = make.norm(shape.kv_lora_rank)
        tensors[prefix + "self_attn.indexer.k_norm.weight"] = torch.ones(INDEX_HEAD_DIM)
        tensors[prefix + "self_attn.indexer.k_norm.bias"] = torch.zeros(INDEX_HEAD_DIM)
        for name, tensor in make.attention().items():
            tensors[f"{prefix}self_attn.{name}.weight"] = tensor
        if layer == 0 or not shape.experts:
            mlp(prefix + "mlp.", shape.intermediate)
            continue
        tensors[prefix + "mlp.gate.weight"] = make.reader(shape.experts)
        tensors[prefix + "mlp.gate.e_score_correction_bias"] = torch.zeros(shape.experts)
        for expert in range(shape.experts):
            mlp(f"{prefix}mlp.experts.{expert}.", shape.intermediate // 4)
        mlp(prefix + "mlp.shared_experts.", shape.intermediate // 4)
    tensors["model.norm.weight"] = make.norm(shape.hidden)
    tensors["lm_head.weight"] = make.head()
    return {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }


def make_checkpoint(directory: str | Path, *, style: Style = "conditioned", seed: int = 0, **shape: int) -> Path:
    """Write a checkpoint that SGLang serves as it is: config, weights, tokenizer, generation config.

    Args:
        directory: made if absent; files of the same names are overwritten.
        style: see the module.
        seed: of all weights.
        shape: fields of :class:`Shape` that differ from its defaults.

    Returns:
        ``directory`` as a Path.

    Raises:
        ValueError: a size is not legal, or ``style`` is unknown.
    """
    from safetensors.torch import save_file

    sizes = Shape(**shape)
    tensors = weights(sizes, style, seed)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(sizes.config(), indent=1))
    generation = {"bos_token_id": byte_tokenizer.BOS, "eos_token_id": byte_tokenizer.EOS, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))
    byte_tokenizer.save(directory, CONTEXT_LEN)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m hisparse.cpu.checkpoint", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--style", choices=("conditioned", "plain"), default="conditioned")
    parser.add_argument("--seed", type=int, default=0)
    defaults = Shape()
    for name in Shape.__dataclass_fields__:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(defaults, name), metavar="N")
    options = vars(parser.parse_args(arguments))
    try:
        directory = make_checkpoint(**options)
    except ValueError as error:
        parser.error(str(error))
    print(f"{directory}: {(directory / 'model.safetensors').stat().st_size / 1e6:.1f} MB of weights")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
