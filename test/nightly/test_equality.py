"""The real SGLang on a GPU, CUDA graphs and overlap scheduling on: HiSparse on and off give the same tokens (I6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.cpu.checkpoint import make_checkpoint
from hisparse.local_server import LocalServer

from .servers import (
    BUFFER,
    FLAGS,
    INDEX_TOPK,
    PAGE,
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

WORKSPACE: dict[str, dict[str, int]] = {"bfloat16": {}, "fp8_e4m3": {"workspace_tokens": 65_536}}
"""A batch larger than the workspace goes through it in groups. flashmla_sparse computes each query for itself, so that
groups change no bit; flashmla_kv splits its work by the batch, so a group is to it what another batch would be."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3.2's attention shapes, with weights whose outputs bear a change at the selection's edge."""
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), style="conditioned", layers=4, hidden=2048, heads=64, index_topk=INDEX_TOPK,
        index_heads=64, kv_lora_rank=512, q_lora_rank=1536, nope_dim=128, value_dim=128, intermediate=2048,
        vocab=32_000,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["bfloat16", "fp8_e4m3"])
def pair(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("logs")
    flags = (
        *FLAGS, *REPEATABLE, *row_flags(request.param), "--context-length", "32768", "--max-total-tokens", "131072",
        "--max-running-requests", "8", "--cuda-graph-max-bs-decode", "8", "--mem-fraction-static", "0.3",
    )  # fmt: skip
    servers = {
        name: LocalServer(
            checkpoint, *flags, *more, log=logs / f"{name}.log", environment=REPEATABLE_ENVIRONMENT, timeout_s=600
        )
        for name, more in (("on", hisparse_flags(host_memory_gib=8, **WORKSPACE[request.param])), ("off", ()))
    }
    with start_together(servers):
        yield servers


def test_without_hisparse_a_server_repeats_itself(pair: Pair) -> None:
    """Else the tests below would mean nothing."""
    answers = []
    for _ in range(2):
        flush(pair)  # or the second prompt would be split otherwise, at the cached prefix
        answers += ask(pair["off"], [prompt(1, 6000)], 100)
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].logprobs == answers[1].logprobs
    assert len(set(answers[0].tokens)) > 5, f"the model repeats itself: {answers[0].tokens}"


@pytest.mark.parametrize("length", [1000, INDEX_TOPK, BUFFER + PAGE + 1, 6000, 20_000])
def test_one_request(pair: Pair, length: int) -> None:
    """Up to three chunks of prefill, and a prompt five times the hot buffer."""
    assert_same(pair, [prompt(length, length)], 130)


def test_batch_of_mixed_lengths(pair: Pair) -> None:
    lengths = [1, 70, 2000, 4160, 5000, 9000, 12_000, 20_000]
    assert_same(pair, [prompt(100 + n, n) for n in lengths], 300)


def test_generated_rows_leave_the_device_and_come_back(pair: Pair) -> None:
    """Far past tail ring and eviction, where graphs that forget the backup garble the text (FIELD F17)."""
    before = pair["on"].hisparse_state()
    assert_same(pair, [prompt(7, 300), prompt(8, 3000)], 2 * BUFFER)
    after = pair["on"].hisparse_state()
    assert before is not None and after is not None
    assert after["missed_positions"] - before["missed_positions"] > 2 * BUFFER
    assert after["tail_ring_positions"] > before["tail_ring_positions"]


def test_shared_prefix_comes_from_the_host(pair: Pair) -> None:
    """With bf16 rows the sequences together exceed the workspace."""
    prefix = prompt(20, 9000)
    assert_same(pair, [prefix + prompt(21, 30)], 20)
    for server in pair.values():
        ask(server, [prefix], 1)
    answers = {name: ask(server, [prefix + prompt(22 + i, 50) for i in range(4)], 60) for name, server in pair.items()}
    assert [a.cached for a in answers["on"]] == [a.cached for a in answers["off"]]
    assert [a.tokens for a in answers["on"]] == [a.tokens for a in answers["off"]]
    assert all(a.cached >= 8960 for a in answers["on"])
