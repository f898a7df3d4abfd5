"""DeepSeek-V3.2's layer shapes, a few layers of them: the config.json that `--load-format dummy` needs.

What one GPU of an 8-GPU server with data-parallel attention and expert parallelism runs: all 128 heads, 32 of the 256
experts, an eighth of the vocabulary. Sizes: https://huggingface.co/deepseek-ai/DeepSeek-V3.2 config.json.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 16_160


def write_config(folder: Path, *, layers: int = 8, experts: int = 32) -> Path:
    """Write config.json and generation_config.json; the folder."""
    config = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "ep_size": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 163_840,
        "rope_theta": 10_000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "use_cache": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    return folder
