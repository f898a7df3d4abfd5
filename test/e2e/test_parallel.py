"""Several ranks: HiSparse on and off give the same tokens and log probabilities with tensor parallelism and with
data-parallel attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.budget import GIB
from hisparse.local_server import LocalServer

from .pair import DEVICE_BUFFER_SIZE, PAGE_SIZE, Pair, disconnect_after, prompt, start_pair, wait_until_idle

RANKS = 2
REGION_EDGE = DEVICE_BUFFER_SIZE + PAGE_SIZE
HOST_MEMORY_GIB = 0.0125
POOL_TOKENS = 17408
"""What HOST_MEMORY_GIB holds of the plain checkpoint's rows, 2 layers of 384 B, less a page of padding."""


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
    ) as pair:
        yield pair


def test_tensor_parallel_batch(tensor_parallel: Pair) -> None:
    """Mixed lengths, longer than a region too; outputs that leave the tail ring and are evicted."""
    prompts = [prompt(n, n) for n in (1, 65, 300, 1500)]
    on, off = (answers(server, prompts, max_new_tokens=REGION_EDGE + 8) for server in tensor_parallel)
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
    row_bytes = 2 * 384
    assert (state["host_pool_tokens"], state["processes_per_host"]) == (POOL_TOKENS, RANKS)
    assert state["host_pool_bytes"] == (POOL_TOKENS + PAGE_SIZE) * row_bytes
    assert HOST_MEMORY_GIB * GIB - PAGE_SIZE * row_bytes < state["host_pool_bytes"] <= HOST_MEMORY_GIB * GIB
    tables = re.findall(r"TP(\d)\] HiSparse: (\d+) requests at once, (\d+) tokens", tensor_parallel.on.log_text())
    assert sorted(tables) == [(str(rank), "8", str(POOL_TOKENS)) for rank in range(RANKS)]
    totals = re.findall(r"host +host total +([\d.]+) GiB  2 processes", tensor_parallel.on.log_text())
    assert totals == [f"{RANKS * state['host_pool_bytes'] / GIB:.3f}"] * RANKS
