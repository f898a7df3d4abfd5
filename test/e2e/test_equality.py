"""Temperature 0: HiSparse on and off give the same tokens (I6), wherever the rows came from."""

from __future__ import annotations

import pytest

from .pair import CHUNK, DEVICE_BUFFER_SIZE, INDEX_TOPK, PAGE_SIZE, Pair, prompt

BUFFER_EDGE = DEVICE_BUFFER_SIZE
REGION_EDGE = DEVICE_BUFFER_SIZE + PAGE_SIZE


@pytest.mark.parametrize(
    "length",
    [1, INDEX_TOPK - 1, INDEX_TOPK, INDEX_TOPK + 1, BUFFER_EDGE - 1, BUFFER_EDGE, BUFFER_EDGE + 1, REGION_EDGE, 1500],
)
def test_one_request(pair: Pair, length: int) -> None:
    pair.generate([prompt(length, length)], max_new_tokens=40)


def test_batch_of_mixed_lengths(pair: Pair) -> None:
    lengths = [1, 10, 64, 65, 200, 700, 1500, 5000]
    pair.generate([prompt(100 + n, n) for n in lengths], max_new_tokens=200)


def test_outputs_longer_than_the_region(pair: Pair) -> None:
    """Generated rows leave the tail ring, are evicted and come back from the host (FIELD F17, F18)."""
    before = pair.on.hisparse_state()
    pair.generate([prompt(7, 20), prompt(8, 300)], max_new_tokens=2 * REGION_EDGE)
    after = pair.on.hisparse_state()
    assert before is not None and after is not None
    # 20 prompt tokens cannot make this many misses: they are generated rows.
    assert after["missed_positions"] - before["missed_positions"] > 2 * REGION_EDGE
    assert after["tail_ring_positions"] > before["tail_ring_positions"]


def test_prompt_in_chunks(pair: Pair) -> None:
    assert pair.on.get("/server_info")["chunked_prefill_size"] == CHUNK
    pair.generate([prompt(9, 5 * CHUNK + 1)], max_new_tokens=40)
    pair.generate([prompt(10, 2 * CHUNK), prompt(11, 3 * CHUNK - 1)], max_new_tokens=40)


def test_shared_prefix_is_reused_from_the_host(pair: Pair) -> None:
    """Radix cache on: same cached counts as off, also when together the sequences exceed the workspace (FIELD F10)."""
    prefix = prompt(20, 4000)
    pair.generate([prefix + prompt(21, 30)], max_new_tokens=20)
    answers = pair.generate([prefix + prompt(22 + i, 20 + 7 * i) for i in range(4)], max_new_tokens=40)
    assert all(answer["meta_info"]["cached_tokens"] >= 3968 for answer in answers)


def test_conversation(pair: Pair) -> None:
    history = prompt(30, 900)
    for turn in range(4):
        (answer,) = pair.generate([history], max_new_tokens=80)
        history = history + answer["output_ids"] + prompt(31 + turn, 25)
    assert answer["meta_info"]["cached_tokens"] >= 960
