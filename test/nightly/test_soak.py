"""Half an hour of changing load with clients that go away: nothing fails, memory stays, and answers are still right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.cpu.checkpoint import make_checkpoint
from hisparse.local_server import LocalServer

from .servers import FLAGS, INDEX_TOPK, REPEATABLE, REPEATABLE_ENVIRONMENT, ask, hisparse_flags, prompt, row_flags

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]

SOAK = Path(__file__).parents[2] / "benchmark" / "serving" / "soak.py"
MINUTES = os.environ.get("HISPARSE_SOAK_MINUTES") or "30"


def test_soak(tmp_path: Path) -> None:
    """The pool is small enough that requests are retracted. A prompt is answered alike before and after."""
    model = make_checkpoint(
        tmp_path / "model", style="conditioned", layers=4, hidden=2048, heads=64, index_topk=INDEX_TOPK,
        index_heads=64, kv_lora_rank=512, q_lora_rank=1536, nope_dim=128, value_dim=128, intermediate=2048,
        vocab=32_000,
    )  # fmt: skip
    flags = (
        *FLAGS, *REPEATABLE, *row_flags("bfloat16"), "--context-length", "40960", "--max-total-tokens", "131072",
        "--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16", "--mem-fraction-static", "0.4",
        "--schedule-conservativeness", "0.3", *hisparse_flags(host_memory_gib=8),
    )  # fmt: skip
    log = tmp_path / "log"
    with LocalServer(model, *flags, log=log, environment=REPEATABLE_ENVIRONMENT, timeout_s=600) as server:
        (before,) = ask(server, [prompt(1, 9000)], 200)
        command = [sys.executable, str(SOAK), "--minutes", MINUTES, "--url", server.url, "--pid", str(server.pid)]
        command += ["--log", str(log), "--clients", "32", "--longest-prompt", "32000", "--longest-output", "1000"]
        command += ["--vocabulary", "30000"]
        subprocess.run(command, check=True)
        assert "flushed" in str(server.post("/flush_cache?timeout=60")).lower()
        (after,) = ask(server, [prompt(1, 9000)], 200)
        assert after.tokens == before.tokens
        state = server.hisparse_state()
        assert state is not None and state["missed_positions"] > 0
