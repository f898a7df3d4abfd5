"""Several ranks: HiSparse on and off give the same tokens and log probabilities with tensor parallelism and with
data-parallel attention."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hisparse.budget import GIB
from hisparse.local_server import LocalServer

from .pair import (
    DEVICE_BUFFER_SIZE,
    FORKED,
    INDEX_TOPK,
    PAGE_SIZE,
    Pair,
    disconnect_after,
    prompt,
    start_pair,
    wait_until_idle,
    when_written,
)

RANKS = 2
LAYERS = 2
ROW_BYTES = 384
"""Of the plain checkpoint."""
REGION_EDGE = DEVICE_BUFFER_SIZE + PAGE_SIZE
PAST_TAIL = PAGE_SIZE + 16
"""New tokens whose first ones have left the tail ring."""
LOG_INTERVAL = 20
HOST_MEMORY_GIB = 0.0125
POOL_TOKENS = 17408
"""What HOST_MEMORY_GIB holds, less a page of padding."""


def answers(server: LocalServer, prompts: list[list[int]], rank: int | None = None, **sampling: Any) -> list[Any]:
    """Tokens, log probabilities and cached counts of a batch, sent as one request."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "routed_dp_rank": rank,
    }
    return [
        (answer["output_ids"], answer["meta_info"]["output_token_logprobs"], answer["meta_info"]["cached_tokens"])
        for answer in server.post("/generate", body)
    ]


@pytest.fixture(scope="module")
def tensor_parallel(plain_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    config = f'{{"device_buffer_size": {DEVICE_BUFFER_SIZE}, "host_memory_gib": {HOST_MEMORY_GIB}}}'
    with start_pair(
        plain_checkpoint,
        tmp_path_factory.mktemp("tensor_parallel"),
        *("--tp-size", str(RANKS), "--max-total-tokens", str(POOL_TOKENS)),
        on_flags=("--enable-hisparse", "--hisparse-config", config),
        launcher=FORKED,
    ) as pair:
        yield pair


def test_tensor_parallel_batch(tensor_parallel: Pair) -> None:
    """Mixed lengths, longer than a region too; outputs that leave the tail ring and are evicted."""
    prompts = [prompt(n, n) for n in (1, 65, 300, 1500)]
    on, off = (answers(server, prompts, max_new_tokens=PAST_TAIL) for server in tensor_parallel)
    assert on == off
    state = tensor_parallel.on.hisparse_state()
    assert state is not None and state["missed_positions"] > 2 * REGION_EDGE and state["tail_ring_positions"] > 0


def test_tensor_parallel_prefix_after_a_disconnect(tensor_parallel: Pair) -> None:
    """A shared prefix and a second turn read their rows back from each rank's own host pool."""
    disconnect_after(tensor_parallel.on, 3, prompt(1, 700))
    wait_until_idle(tensor_parallel.on)
    tensor_parallel.flush()
    prefix = prompt(2, 900)
    for prompts, reused in (
        ([prefix + prompt(3, 20)], 0),
        ([prefix + prompt(4, 100), prefix + prompt(5, 1)], 896),
    ):
        on, off = (answers(server, prompts, max_new_tokens=10) for server in tensor_parallel)
        assert on == off
        assert all(cached >= reused for _, _, cached in on)


def test_tensor_parallel_sizes(tensor_parallel: Pair) -> None:
    """`host_memory_gib` is of each process: every rank has a pool of that size, and the log gives the sum."""
    (state,) = [inside["hisparse"] for inside in tensor_parallel.on.get("/server_info")["internal_states"]]
    token_bytes = LAYERS * ROW_BYTES
    assert (state["host_pool_tokens"], state["processes_per_host"]) == (POOL_TOKENS, RANKS)
    assert state["host_pool_bytes"] == (POOL_TOKENS + PAGE_SIZE) * token_bytes
    assert HOST_MEMORY_GIB * GIB - PAGE_SIZE * token_bytes < state["host_pool_bytes"] <= HOST_MEMORY_GIB * GIB
    tables = re.findall(r"TP(\d)\] HiSparse: (\d+) requests at once, (\d+) tokens", tensor_parallel.on.log_text())
    assert sorted(tables) == [(str(rank), "8", str(POOL_TOKENS)) for rank in range(RANKS)]
    totals = re.findall(r"host +host total +([\d.]+) GiB  2 processes", tensor_parallel.on.log_text())
    assert totals == [f"{RANKS * state['host_pool_bytes'] / GIB:.3f}"] * RANKS


# ---- data-parallel attention: a group of one rank each, whose dense layers see the tokens of both


@pytest.fixture(scope="module")
def data_parallel(plain_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Path]]:
    directory = tmp_path_factory.mktemp("data_parallel")
    config = {"device_buffer_size": DEVICE_BUFFER_SIZE, "trace": str(directory / "traces")}
    with start_pair(
        plain_checkpoint,
        directory,
        *("--tp-size", str(RANKS), "--dp-size", str(RANKS), "--enable-dp-attention"),
        *("--max-total-tokens", "16384", "--decode-log-interval", str(LOG_INTERVAL)),
        on_flags=("--enable-hisparse", "--hisparse-config", json.dumps(config), "--enable-metrics"),
        launcher=FORKED,
    ) as pair:
        yield pair, directory / "traces"


def test_one_group_is_idle_while_the_other_decodes(data_parallel: tuple[Pair, Path]) -> None:
    pair, _ = data_parallel
    before = pair.on.hisparse_states()
    on, off = (answers(server, [prompt(1, 300), prompt(2, 10)], rank=1, max_new_tokens=12) for server in pair)
    assert on == off
    after = pair.on.hisparse_states()
    assert after[0]["selected_positions"] == before[0]["selected_positions"]
    assert after[1]["missed_positions"] > before[1]["missed_positions"]


def test_uneven_groups(data_parallel: tuple[Pair, Path]) -> None:
    """The shorter batch is padded to the longer one's rows; only rows of requests are looked up, stored and counted.

    When a group's requests come in relation to the other's steps is left to chance, and with it the rows of the dense
    layers' products. HiSparse off repeats its log probabilities to the bit all the same, so on must have them too.
    """
    pair, _ = data_parallel
    loads = [[prompt(n, n) for n in (1, 200, 700)], [prompt(9, 500)]]
    before = pair.on.hisparse_states()
    with ThreadPoolExecutor(2 * RANKS) as clients:
        on, off = (
            [clients.submit(answers, server, load, rank, max_new_tokens=PAST_TAIL) for rank, load in enumerate(loads)]
            for server in pair
        )
        assert [answer.result() for answer in on] == [answer.result() for answer in off]
    for load, was, now in zip(loads, before, pair.on.hisparse_states(), strict=True):
        lengths = [len(ids) + step for ids in load for step in range(1, PAST_TAIL + 1)]
        # One step runs ahead of a request's end. A request selects what it has, at most top-k.
        assert now["selected_positions"] - was["selected_positions"] == sum(
            LAYERS * min(length, INDEX_TOPK) for length in lengths
        )
        assert now["backed_up_bytes"] - was["backed_up_bytes"] == LAYERS * ROW_BYTES * (
            len(lengths) + sum(len(ids) for ids in load)
        )


def test_every_group_reports_for_itself(data_parallel: tuple[Pair, Path]) -> None:
    """`/server_info`, metrics, log lines and traces."""
    pair, traces = data_parallel
    with ThreadPoolExecutor(RANKS) as clients:
        sent = [
            clients.submit(answers, pair.on, [prompt(30 + rank, 70)], rank, max_new_tokens=LOG_INTERVAL + 4)
            for rank in range(RANKS)
        ]
    assert all(answer.result() for answer in sent)
    wait_until_idle(pair.on)
    states = pair.on.hisparse_states()
    assert [(state["dp_rank"], state["regions"], state["regions_used"]) for state in states] == [(0, 4, 0), (1, 4, 0)]
    samples = [
        sample
        for family in text_string_to_metric_families(pair.on.get("/metrics"))
        for sample in family.samples
        if sample.name.startswith("sglang:hisparse_")
    ]
    for name in ("selected_positions_total", "missed_positions_total", "backed_up_bytes_total", "regions"):
        found = {s.labels["dp_rank"]: s.value for s in samples if s.name == f"sglang:hisparse_{name}"}
        assert found == {str(state["dp_rank"]): state[name.removesuffix("_total")] for state in states}, name
    for rank in range(RANKS):
        assert re.search(rf"DP{rank} TP{rank}\] Decode batch, .*hisparse hit rate: .*regions: \d/4", pair.on.log_text())
    assert sorted(Path(state["trace_folder"]) for state in states) == sorted(traces.iterdir())
    for state in states:
        trace = when_written(Path(state["trace_folder"]), state["selected_positions"])
        assert trace.about["rank"] == state["dp_rank"]
        selected = ((trace.selected >= 0) & (trace.selected < trace.seq_len[:, None])).sum()
        assert selected == state["selected_positions"]
