"""A prompt far longer than any device KV pool (FIELD F5): 256k tokens with 2 GB of device memory for KV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hisparse.cpu.checkpoint import make_checkpoint
from hisparse.local_server import LocalServer

from .servers import FLAGS, INDEX_TOPK, ask, hisparse_flags, prompt, row_flags, start_together

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]

TOKENS = 262_144
LAYERS = 8
DEVICE_BYTES = 2 * 10**9


def test_a_prompt_of_256k_tokens_on_2_gb(tmp_path: Path) -> None:
    """HISPARSE_DEBUG (without CUDA graphs, which cannot hold its checks): each swapped-in row equals its host row."""
    model = make_checkpoint(
        tmp_path / "model", style="conditioned", layers=LAYERS, hidden=1024, heads=64, index_topk=INDEX_TOPK,
        index_heads=64, kv_lora_rank=512, q_lora_rank=512, nope_dim=128, value_dim=128, intermediate=1024,
        vocab=32_000,
    )  # fmt: skip
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2 * TOKENS}))
    flags = (
        *FLAGS, *row_flags("bfloat16"), "--context-length", str(TOKENS + 4096), "--max-total-tokens",
        str(TOKENS + 8192), "--max-running-requests", "2", "--mem-fraction-static", "0.4", "--disable-cuda-graph",
        *hisparse_flags(host_memory_gib=4),
    )  # fmt: skip
    server = LocalServer(
        model, *flags, log=tmp_path / "log", environment={"HISPARSE_DEBUG": "1"}, timeout_s=600
    )  # fmt: skip
    with start_together({"on": server}):
        (answer,) = ask(server, [prompt(5, TOKENS)], 200)
        state = server.hisparse_state()
    assert len(answer.tokens) == 200
    assert state is not None and state["device_bytes"] <= DEVICE_BYTES
    assert LAYERS * TOKENS * 1152 > DEVICE_BYTES, "without HiSparse it would fit"
