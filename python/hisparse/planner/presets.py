"""The parts of published models' config.json that sizing needs.

Sources, read on 2026-11-30:
- DeepSeek-V3.2: the defaults of `DeepseekV32Config` in transformers 5.12.1, and NVIDIA NeMo AutoModel's
  documentation of the same class, which agree. The checkpoint's weights are fp8 in blocks of 128 x 128.
- GLM-5 (and 5.1, the same shape): the defaults of `GlmMoeDsaConfig` in transformers 5.12.1, whose checkpoint is named
  as zai-org/GLM-5, and NVIDIA aiconfigurator's copy of zai-org/GLM-5-FP8's configuration.
- GLM-5.2: GLM-5's shape with a longer context and selections shared by four layers; two independent public projects
  that check the official configuration agree on the numbers (full indexers in layers 0 to 2 and every fourth from 6).
For the GLMs the weights are taken as those of the -FP8 repositories, in DeepSeek's format.
"""

from __future__ import annotations

from typing import Any

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

_GLM_5 = {
    "vocab_size": 154_880,
    "hidden_size": 6_144,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2_048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 2_048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2_048,
    "max_position_embeddings": 202_752,
    "tie_word_embeddings": False,
    "quantization_config": _FP8,
}

PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": {
        "vocab_size": 129_280,
        "hidden_size": 7_168,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2_048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "q_lora_rank": 1_536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2_048,
        "max_position_embeddings": 163_840,
        "tie_word_embeddings": False,
        "quantization_config": _FP8,
    },
    "glm-5": _GLM_5,
    "glm-5.2": {
        **_GLM_5,
        "max_position_embeddings": 1_048_576,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
    },
}
