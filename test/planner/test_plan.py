"""Plans: they fit, one request more does not, and the server would take their flags."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hisparse.budget import GIB, plan_budget
from hisparse.config import HiSparseConfig, HiSparseError
from hisparse.planner.hardware import default_fraction, gpu_memory_bytes
from hisparse.planner.model import load_model
from hisparse.planner.plan import HIT_RATES, Load, Machine, Plan, make_plan

NEEDLE = str(Path(__file__).parents[2] / "models/needle")


def plan_of(
    model: str = "deepseek-v3.2",
    *,
    dp: int = 8,
    host_gib: float = 2000,
    prompt_len: int = 131_072,
    kv: str = "fp8_e4m3",
    **load: Any,
) -> Plan:
    memory = gpu_memory_bytes("h200")
    machine = Machine(8, dp, memory, int(host_gib * GIB), default_fraction(memory))
    given = {"buffer": None, "requests": None, "step_s": 0.05, **load}
    return make_plan(load_model(model), machine, Load(prompt_len, 1024, kv, **given))


MANY = [
    {"model": model, "dp": dp, "host_gib": host, "prompt_len": length, "kv": kv}
    for model in ("deepseek-v3.2", "glm-5", "glm-5.2")
    for dp in (1, 8)
    for host in (300, 4000)
    for length in (8192, 131_072)
    for kv in ("bfloat16", "fp8_e4m3")
]


@pytest.mark.parametrize("arguments", MANY, ids=lambda a: "-".join(map(str, a.values())))
def test_a_plan_fits_and_one_request_more_does_not(arguments: dict[str, Any]) -> None:
    plan = plan_of(**arguments)
    budget, tokens = plan.budget, plan.load.request_tokens
    assert budget.device_bytes <= plan.kv_bytes
    assert budget.host_pool_bytes * plan.machine.gpus <= 0.9 * plan.machine.host_bytes
    assert budget.slots >= plan.requests * tokens
    assert budget.regions == plan.requests + 1
    more = plan.requests + 1
    bigger = dataclasses.replace(budget, regions=more + 1, slots=more * tokens)
    assert (
        bigger.device_bytes > plan.kv_bytes
        or bigger.host_pool_bytes * plan.machine.gpus > 0.9 * plan.machine.host_bytes
    )


@pytest.mark.parametrize("arguments", MANY[::5], ids=lambda a: "-".join(map(str, a.values())))
def test_the_server_would_size_its_pools_alike(arguments: dict[str, Any]) -> None:
    """From the printed flags alone, and the memory that the plan says is there."""
    plan = plan_of(**arguments)
    words = shlex.split(plan.command("some dir"))
    given = dict(itertools.pairwise(words))
    assert given["--model-path"] == "some dir"
    config = HiSparseConfig.from_json(given["--hisparse-config"]).resolve(
        index_topk=plan.model.index_topk, page_size=64, context_len=int(given["--context-length"])
    )
    budget = plan_budget(
        config,
        layers=plan.model.num_hidden_layers,
        row_bytes=plan.budget.row_bytes,
        index_key_bytes=plan.model.index_key_bytes,
        device_bytes=plan.kv_bytes,
        free_host_bytes=0,
        max_requests=int(given["--max-running-requests"]) // plan.machine.dp,
    )
    assert config == dataclasses.replace(plan.budget.config, host_memory_bytes=config.host_memory_bytes)
    assert budget.device_bytes == pytest.approx(plan.budget.device_bytes, rel=1e-3)
    assert budget.host_pool_bytes == pytest.approx(plan.budget.host_pool_bytes, rel=1e-3)


def test_a_larger_buffer_never_costs_a_request_unless_asked_for() -> None:
    chosen = plan_of()
    assert chosen.budget.config.device_buffer_size > 2 * 2048
    assert chosen.requests == plan_of(buffer=2 * 2048).requests
    assert plan_of(buffer=32_704).requests < chosen.requests


def test_what_binds() -> None:
    assert plan_of(host_gib=300).binding == "host memory for the pool is full"
    assert "indexer keys" in plan_of(host_gib=4000).binding
    assert "hot buffer" in plan_of(host_gib=4000, prompt_len=8192).binding
    assert "--requests" in plan_of(requests=8).binding


def test_the_link() -> None:
    """DESIGN's figure: layers x misses x row bytes, over 43 GB/s, and once for each attention group."""
    plan = plan_of()
    assert plan.token_bytes(0.9) == pytest.approx(61 * 204.8 * 656)
    assert plan.link_tokens_per_s(0.9) == pytest.approx(8 * 43e9 / (61 * 204.8 * 656))
    assert plan_of(dp=1).link_tokens_per_s(0.9) == pytest.approx(43e9 / (61 * 204.8 * 656))
    assert plan_of(kv="bfloat16", dp=1).link_tokens_per_s(0.8) == pytest.approx(49e9 / (61 * 409.6 * 1152))
    assert [plan.link_step_s(hit) for hit in HIT_RATES] == pytest.approx(
        [plan.requests * plan.machine.dp / plan.link_tokens_per_s(hit) for hit in HIT_RATES]
    )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    (
        ({"prompt_len": 163_840}, "are more than the 163840 tokens"),
        ({"host_gib": 10}, "not one request of 132096 tokens fits: host memory"),
        ({"requests": 4000}, "--requests 4000 do not fit"),
        ({"buffer": 100}, "device_buffer_size=100 must be a multiple"),
    ),
)
def test_what_does_not_fit_is_said(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HiSparseError, match=sentence):
        plan_of(**changed)


def test_weights_that_do_not_fit() -> None:
    memory = gpu_memory_bytes("h100")
    machine = Machine(8, 1, memory, 10**12, default_fraction(memory))
    load = Load(1000, 100, "bfloat16", None, None, 0.05)
    with pytest.raises(HiSparseError, match=r"the weights need 8.* GiB on each GPU"):
        make_plan(load_model("deepseek-v3.2"), machine, load)


def test_an_fp8_row_needs_the_usual_dimensions(tmp_path: Path) -> None:
    config = json.loads((Path(NEEDLE) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 256}))
    with pytest.raises(HiSparseError, match="needs kv_lora_rank=512"):
        plan_of(str(tmp_path), prompt_len=1000)
