"""Limits come from the host pool: everything at its edges is as without HiSparse; full pools only make others wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..e2e.pair import DEVICE_BUFFER_SIZE, prompt
from .stepped import CHUNK, CONTEXT, LONGEST_PROMPT, PAGE_SIZE, POOL_TOKENS, REGIONS, SteppedPair, start_stepped_pair

SMALL_POOL = 10 * PAGE_SIZE
SMALL_LONGEST = SMALL_POOL - 7
WORKSPACE = CONTEXT + PAGE_SIZE


@pytest.fixture(scope="module")
def small(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedPair]:
    """A pool smaller than the context length, so that it is the limit of a request."""
    with start_stepped_pair(checkpoint, tmp_path_factory.mktemp("small"), pool_tokens=SMALL_POOL) as pair:
        yield pair


@pytest.mark.parametrize("length", (DEVICE_BUFFER_SIZE + PAGE_SIZE + 1, CHUNK + 1, 4 * CHUNK, LONGEST_PROMPT))
def test_prompts_many_times_the_device_budget(pair: SteppedPair, length: int) -> None:
    """FIELD F5, F6: a region has 192 rows; prompt and output fill the context."""
    (output,) = pair.generate(prompt(1, length), max_new_tokens=40)
    assert output.finished == "length"
    assert len(output.output_ids) == min(40, CONTEXT - 2 - length)


def test_the_longest_request_comes_from_context_and_pool(pair: SteppedPair, small: SteppedPair) -> None:
    assert pair.on.state["max_req_len"] == CONTEXT - 1 < POOL_TOKENS
    assert small.on.state["max_req_len"] == SMALL_POOL - 1 < CONTEXT


@pytest.mark.parametrize("length", (LONGEST_PROMPT + 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, POOL_TOKENS + 1))
def test_a_longer_prompt_is_refused(pair: SteppedPair, length: int) -> None:
    (output,) = pair.generate(prompt(2, length), max_new_tokens=5)
    assert output.finished == "abort"


@pytest.mark.parametrize("max_new_tokens", (0, 1, 2 * SMALL_POOL))
@pytest.mark.parametrize("length", [SMALL_POOL - 2 * PAGE_SIZE + off for off in (-1, 0, 1, PAGE_SIZE - 1)])
def test_output_up_to_the_end_of_the_pool(small: SteppedPair, length: int, max_new_tokens: int) -> None:
    """SGLang cuts the output so that prompt, output and a page more fit the pool."""
    small.start_over()
    (output,) = small.generate(prompt(3, length), max_new_tokens=max_new_tokens)
    whole_pages = -(-length // PAGE_SIZE) * PAGE_SIZE
    room = SMALL_POOL - whole_pages - PAGE_SIZE - 1
    assert output.finished == "length"
    assert len(output.output_ids) == max(0, min(max_new_tokens, room))


@pytest.mark.parametrize("length", (SMALL_LONGEST + 1, SMALL_POOL - 1, SMALL_POOL, SMALL_POOL + 1))
def test_a_prompt_as_long_as_the_pool_is_refused(small: SteppedPair, length: int) -> None:
    small.start_over()
    (output,) = small.generate(prompt(4, length), max_new_tokens=3)
    assert output.finished == "abort"


def test_a_full_pool_retracts_and_everything_finishes(pair: SteppedPair) -> None:
    """FIELD F2, F3, F24: prompts fit, outputs do not."""
    prompts = [prompt(10 + i, 280 + 20 * i) for i in range(REGIONS)]
    together = pair.generate(*prompts, max_new_tokens=200)
    assert pair.on.state["retracted"] > pair.retracted_before
    assert [len(output.output_ids) for output in together] == [200] * REGIONS


def test_one_long_output_outgrows_its_neighbours(pair: SteppedPair) -> None:
    rids = [pair.submit(prompt(20 + i, 330), 30 + 250 * (i == 0)) for i in range(3)]
    late = pair.submit(prompt(24, 500), 60)
    pair.finish()
    assert [len(pair.output(rid).output_ids) for rid in rids] == [280, 30, 30]
    assert len(pair.output(late).output_ids) == 60


def test_more_requests_than_regions_wait(pair: SteppedPair) -> None:
    """FIELD F15."""
    rids = [pair.submit(prompt(30 + i, 20 + 11 * i), 30) for i in range(3 * REGIONS)]
    state = pair.until(lambda state: len(state["running"]) == REGIONS)
    assert len(state["waiting"]) == 2 * REGIONS and state["free_requests"] == 0
    pair.finish()
    assert [len(pair.output(rid).output_ids) for rid in rids] == [30] * len(rids)


def test_a_batch_whose_sequences_exceed_the_workspace(pair: SteppedPair) -> None:
    """They share a long prefix, so that all are admitted into one prefill batch."""
    prefix = prompt(40, 10 * PAGE_SIZE)
    pair.generate(prefix, max_new_tokens=1)
    rids = [pair.submit(prefix + prompt(41 + i, 30), 40) for i in range(REGIONS)]
    assert REGIONS * (len(prefix) + 30) > WORKSPACE
    state = pair.step()
    assert not state["waiting"] and state["free_requests"] == 0, "not one batch"
    pair.finish()
    assert all(pair.output(rid).cached_tokens >= len(prefix) - PAGE_SIZE for rid in rids)


def test_a_prompt_within_a_page_of_the_pool_blocks_the_queue_as_in_sglang(small: SteppedPair) -> None:
    """SGLang takes it, never admits it, and then believes its empty batch to be full, also when the request is gone.
    Nothing here depends on HiSparse (docs/compatibility.md). The last test of these schedulers: they stay blocked.
    """
    small.start_over()
    small.generate(prompt(7, 100), max_new_tokens=5)
    rid = small.submit(prompt(5, SMALL_POOL - PAGE_SIZE + 1), 3)
    assert small.step(20)["waiting"] == [rid]
    small.abort(rid)
    behind = small.submit(prompt(6, 100), 3)
    assert small.step(20)["waiting"] == [behind]
    assert small.output(rid).finished == "abort"
