"""A model's shape, from its config.json, and the bytes of its weights on one GPU.

Parameters are counted from the shapes of the checkpoint's tensors (DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM);
test/planner compares the counts with transformers' own models. How SGLang 0.5.17 divides them over GPUs:

| part | divided over |
|---|---|
| q_b, kv_b, o projections, and the copies of kv_b that SGLang makes for decode | the GPUs of one attention group |
| q_a, kv_a, indexer, norms, router | nothing: every GPU has all |
| experts, shared experts, dense MLPs, embedding, output head | all GPUs |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hisparse.config import HiSparseError
from hisparse.planner.presets import PRESETS
from hisparse.row_format import Bf16Row, Fp8DsMlaRow

BF16, FP8 = "bf16", "fp8"
SCALE_BLOCK = 128
"""fp8 checkpoints have one float32 scale for a block of 128 x 128 weights."""

INDEX_KEY_GROUP = 128
"""Values of an indexer key that share one float32 scale."""


@dataclass(frozen=True)
class ModelShape:
    """What sizing needs to know of a model. Names are those of config.json.

    Attributes:
        name: for the report. weights: `bf16`, or `fp8` with block scales.
        dense_layers: leading layers with a dense MLP; the others have experts.
        indexer_layers: layers with indexer weights of their own in the checkpoint (GLM-5.2 shares selections).
    """

    name: str
    weights: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    dense_layers: int
    indexer_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def index_key_bytes(self) -> int:
        """A token's indexer key in one layer: fp8 values and their scales. SGLang keeps one in every layer."""
        return self.index_head_dim + self.index_head_dim // INDEX_KEY_GROUP * 4

    def row_bytes(self, kv_cache_dtype: str) -> int:
        """A token's row in one layer."""
        if kv_cache_dtype == "bfloat16":
            return Bf16Row(self.kv_lora_rank, self.qk_rope_head_dim).row_bytes
        row = Fp8DsMlaRow()
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (row.nope_dim, row.rope_dim):
            raise HiSparseError(
                f"--kv-cache-dtype {kv_cache_dtype} needs kv_lora_rank={row.nope_dim} and "
                f"qk_rope_head_dim={row.rope_dim}; {self.name} has {self.kv_lora_rank} and {self.qk_rope_head_dim}."
            )
        return row.row_bytes

    def matrices(self) -> dict[str, list[tuple[int, int, int]]]:
        """Weight matrices by part, as (how many, out features, in features)."""
        hidden, layers, heads = self.hidden_size, self.num_hidden_layers, self.num_attention_heads
        moe_layers = layers - self.dense_layers
        expert, shared = self.moe_intermediate_size, self.moe_intermediate_size * self.n_shared_experts
        kv_b = (layers, heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        return {
            "attention, divided": [
                (layers, heads * (self.qk_nope_head_dim + self.qk_rope_head_dim), self.q_lora_rank),
                kv_b,
                (layers, hidden, heads * self.v_head_dim),
            ],
            "attention, whole": [
                (layers, self.q_lora_rank, hidden),
                (layers, self.kv_lora_rank + self.qk_rope_head_dim, hidden),
            ],
            "indexer": [
                (self.indexer_layers, self.index_n_heads * self.index_head_dim, self.q_lora_rank),
                (self.indexer_layers, self.index_head_dim, hidden),
            ],
            "indexer, bf16": [(self.indexer_layers, self.index_n_heads, hidden)],
            "experts": [
                (2 * moe_layers * self.n_routed_experts, expert, hidden),
                (moe_layers * self.n_routed_experts, hidden, expert),
            ],
            "dense and shared MLPs": [
                (2 * self.dense_layers, self.intermediate_size, hidden),
                (self.dense_layers, hidden, self.intermediate_size),
                (2 * moe_layers, shared, hidden),
                (moe_layers, hidden, shared),
            ],
            "router": [(moe_layers, self.n_routed_experts, hidden)],
            "embedding and head": [(1 if self.tie_word_embeddings else 2, self.vocab_size, hidden)],
            "kv_b copies": [kv_b],
        }

    @property
    def parameters(self) -> int:
        """As in the checkpoint, without a multi-token-prediction layer, which SGLang loads for speculation only."""
        matrices = self.matrices()
        del matrices["kv_b copies"]
        return sum(n * rows * columns for part in matrices.values() for n, rows, columns in part) + self._vectors

    @property
    def _vectors(self) -> int:
        """Norms of each layer, the indexer's layer norm (weight and bias), the router's bias, the last norm."""
        layers = self.num_hidden_layers
        norms = layers * (2 * self.hidden_size + self.q_lora_rank + self.kv_lora_rank) + self.hidden_size
        router = (layers - self.dense_layers) * self.n_routed_experts
        return norms + self.indexer_layers * 2 * self.index_head_dim + router

    def weight_bytes(self, *, gpus: int, attention_gpus: int) -> dict[str, int]:
        """Bytes of each part on one GPU, as SGLang 0.5.17 divides them.

        Args:
            gpus: that the model is divided over. attention_gpus: of one attention group, gpus / data parallel size.
        """
        # SGLang builds an indexer in every layer, whether or not the checkpoint has weights for it.
        matrices = replace(self, indexer_layers=self.num_hidden_layers).matrices()
        nbytes = {}
        for part, shapes in matrices.items():
            divided = {"attention, divided": attention_gpus, "kv_b copies": attention_gpus}.get(part, 1)
            if part in ("experts", "dense and shared MLPs", "embedding and head"):
                divided = gpus
            quantised = self.weights == FP8 and part in (
                "attention, divided", "attention, whole", "indexer", "experts", "dense and shared MLPs"
            )  # fmt: skip
            nbytes[part] = sum(n * matrix_bytes(rows, columns, quantised) for n, rows, columns in shapes) // divided
        nbytes["norms"] = 2 * self._vectors
        return nbytes


def matrix_bytes(rows: int, columns: int, quantised: bool) -> int:
    """bf16, or fp8 with a float32 scale for each block."""
    if not quantised:
        return 2 * rows * columns
    return rows * columns + 4 * math.ceil(rows / SCALE_BLOCK) * math.ceil(columns / SCALE_BLOCK)


def load_model(model: str, *, weights: str | None = None, count_weights: bool = True) -> ModelShape:
    """A preset's name, a directory with a config.json, or the file itself.

    Args:
        weights: `bf16` or `fp8`, instead of what the configuration says.
        count_weights: False if their bytes are known otherwise: then any quantisation will do.

    Raises:
        HiSparseError: no such preset or file, or a model that HiSparse cannot serve.
    """
    if model in PRESETS:
        return from_config(PRESETS[model], name=model, weights=weights)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise HiSparseError(
            f"MODEL {model} must be one of {', '.join(PRESETS)}, or a directory with a config.json, or such a file."
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise HiSparseError(f"MODEL {model}: {path} is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise HiSparseError(f"MODEL {model}: {path} must hold a JSON object.")
    return from_config(config, name=model, weights=weights if count_weights else weights or BF16)


def from_config(config: Mapping[str, Any], *, name: str, weights: str | None = None) -> ModelShape:
    """Read a config.json. Raises `HiSparseError` for a model without an indexer, a missing key or unknown weights."""

    def number(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise HiSparseError(f"MODEL {name}: config.json must have a whole number {key}, not {value!r}.")
        return value

    if "index_topk" not in config:
        raise HiSparseError(
            f"MODEL {name} has no index_topk in its config.json: it is not a sparse-attention (DSA) model."
        )
    layers = number("num_hidden_layers")
    return ModelShape(
        name=name,
        weights=weights or _weights(config, name),
        dense_layers=min(number("first_k_dense_replace"), layers),
        indexer_layers=_indexer_layers(config, layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        **{
            field: number(field)
            for field in (
                *("hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size"),
                *("n_routed_experts", "n_shared_experts", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
                *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim"),
                *("index_topk", "max_position_embeddings"),
            )
        },
    )  # fmt: skip


def _weights(config: Mapping[str, Any], name: str) -> str:
    quantization = config.get("quantization_config")
    if quantization is None:
        return BF16
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("weight_block_size") == [SCALE_BLOCK, SCALE_BLOCK]:
        return FP8
    raise HiSparseError(
        f"MODEL {name} has weights quantised by {method!r}, whose bytes are not known here; known are bf16 and fp8 in "
        f"blocks of {SCALE_BLOCK} x {SCALE_BLOCK}. Give --weights-gib, the gigabytes of weights on each GPU."
    )


def _indexer_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers that select for themselves. GLM-5.2 selects in one of four and says so by a list or by frequency and
    offset; the rule for the latter is that of transformers and SGLang."""
    types = config.get("indexer_types")
    if types is not None:
        return sum(kind == "full" for kind in types[:layers])
    frequency, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
    return sum(max(layer - offset + 1, 0) % frequency == 0 for layer in range(layers))
