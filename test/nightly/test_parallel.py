"""Two ranks, by tensor parallelism and by data-parallel attention: HiSparse on and off give the same tokens.

With two GPUs each rank has one, and CUDA graphs are on. With one GPU both share it (one_gpu_plugin/), without graphs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hisparse.cpu.checkpoint import make_checkpoint
from hisparse.local_server import LocalServer

from .servers import (
    FLAGS,
    INDEX_TOPK,
    REPEATABLE,
    REPEATABLE_ENVIRONMENT,
    Pair,
    ask,
    assert_same,
    flush,
    hisparse_flags,
    prompt,
    row_flags,
    start_together,
)

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]

PLUGIN = Path(__file__).parent / "one_gpu_plugin"
GRAPHS = ("--cuda-graph-max-bs-decode", "8", "--disable-custom-all-reduce")
LAYOUTS = {"tp": (), "dp attention": ("--dp-size", "2", "--enable-dp-attention")}


def placement(plugins: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags and variables that place two ranks on the GPUs there are."""
    if torch.cuda.device_count() > 1:
        return GRAPHS, {"SGLANG_PLUGINS": plugins}
    sys.path.insert(0, str(PLUGIN))
    try:
        import hisparse_test_one_gpu as one_gpu
    finally:
        sys.path.remove(str(PLUGIN))
    path = os.pathsep.join(part for part in (str(PLUGIN), os.environ.get("PYTHONPATH")) if part)
    variables = {"SGLANG_PLUGINS": f"{plugins},hisparse_test_one_gpu", "PYTHONPATH": path}
    return ("--disable-cuda-graph",), {**one_gpu.ENVIRONMENT, **variables}


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("parallel")
    model = make_checkpoint(
        folder / "model", style="conditioned", layers=3, hidden=1024, heads=64, index_topk=INDEX_TOPK,
        index_heads=64, kv_lora_rank=512, q_lora_rank=512, nope_dim=128, value_dim=128, intermediate=1024,
        vocab=32_000,
    )  # fmt: skip
    place, variables = placement("hisparse")
    flags = (
        *FLAGS, *REPEATABLE, *row_flags("bfloat16"), "--tp-size", "2", *LAYOUTS[request.param], *place,
        "--context-length", "24576", "--max-total-tokens", "65536", "--max-running-requests", "8",
        "--mem-fraction-static", "0.2",
    )  # fmt: skip
    servers = {
        name: LocalServer(
            model, *flags, *more, log=folder / f"{name}.log", timeout_s=600,
            environment={**REPEATABLE_ENVIRONMENT, **variables},
        )
        for name, more in (("on", hisparse_flags(host_memory_gib=4)), ("off", ()))
    }  # fmt: skip
    with start_together(servers):
        yield servers


@pytest.mark.parametrize("length", [1000, 5000, 20_000])
def test_one_request(pair: Pair, length: int) -> None:
    assert_same(pair, [prompt(length, length)], 130)


def test_a_batch_of_mixed_lengths(pair: Pair) -> None:
    """Data-parallel attention spreads it over the ranks: their batches differ in size. What is decoded beside what
    depends on when requests arrive, so log probabilities may differ in their last bits."""
    prompts = [prompt(300 + n, n) for n in (70, 2100, 4200, 6000, 9000)]
    flush(pair)
    answers = {name: ask(server, prompts, 200) for name, server in pair.items()}
    for ours, plain in zip(answers["on"], answers["off"], strict=True):
        assert ours.tokens == plain.tokens
    state = pair["on"].hisparse_state()
    assert state is not None and state["missed_positions"] > 0
