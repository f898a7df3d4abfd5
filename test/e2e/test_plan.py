"""`hisparse plan` against a server started with the command it printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hisparse.budget import GIB
from hisparse.local_server import LocalServer
from hisparse.planner.model import load_model
from hisparse.planner.plan import Load, Machine, Plan, make_plan

from .pair import FORKED

NEEDLE = Path(__file__).parents[2] / "models/needle"


@pytest.fixture(scope="module")
def plan() -> Plan:
    machine = Machine(gpus=1, dp=1, gpu_bytes=8 * GIB, host_bytes=GIB // 4, fraction=0.5, on_gpu=False)
    load = Load(prompt_len=4096, output_len=256, kv_cache_dtype="bfloat16", buffer=512, requests=5, step_s=0.05)
    return make_plan(load_model(str(NEEDLE)), machine, load)


def test_byte_counts_equal_what_the_server_prints(plan: Plan, tmp_path: Path) -> None:
    words = shlex.split(plan.command(str(NEEDLE)))
    flags = words[words.index("--model-path") + 2 :]
    with LocalServer(NEEDLE, *flags, "--sleep-on-idle", log=tmp_path / "log", launcher=FORKED) as server:
        state = server.hisparse_state()
        log = server.log_text()
    assert state is not None
    assert state["regions"] == plan.requests
    planned = plan.budget
    for name in ("host_pool_bytes", "hot_rows_bytes", "workspace_bytes", "index_keys_bytes", "device_bytes"):
        assert state[name] == pytest.approx(getattr(planned, name), rel=0.01), name
    assert state["host_pool_tokens"] == pytest.approx(planned.slots, rel=0.01)
    printed = [line for line in log.splitlines() if line.startswith(("  device", "  host"))]
    expected = planned.table().splitlines()[1:]
    assert [line.split()[:2] for line in printed] == [line.split()[:2] for line in expected]
    for ours, theirs in zip(expected, printed, strict=True):
        assert _gib(ours) == pytest.approx(_gib(theirs), rel=0.01, abs=0.0011)


def _gib(line: str) -> float:
    words = line.split()
    return float(words[words.index("GiB") - 1])
