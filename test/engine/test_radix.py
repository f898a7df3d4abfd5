"""Prefix reuse from the host pool, at chosen iterations; `SteppedPair` compares on and off after each of them."""

from __future__ import annotations

import pytest

from ..e2e.pair import DEVICE_BUFFER_SIZE, prompt
from .stepped import PAGE_SIZE, POOL_TOKENS, SteppedPair


def gathered(pair: SteppedPair) -> int:
    return pair.on.state["hisparse"]["prefix_tokens_gathered"]


def missed(pair: SteppedPair) -> int:
    return pair.on.state["hisparse"]["missed_positions"]


def test_a_prefix_that_was_never_on_the_device_in_this_request(pair: SteppedPair) -> None:
    """FIELD F10. Another request, gone since, computed it; all its rows come from the host pool."""
    prefix = prompt(1, 8 * PAGE_SIZE)
    pair.generate(prefix + prompt(2, 10), max_new_tokens=2)
    before = gathered(pair), missed(pair)
    (output,) = pair.generate(prefix + prompt(3, 20), max_new_tokens=100)
    assert output.cached_tokens == len(prefix)
    assert gathered(pair) - before[0] == len(prefix)
    assert missed(pair) - before[1] > DEVICE_BUFFER_SIZE


def test_generated_tokens_are_a_prefix_too(pair: SteppedPair) -> None:
    """A conversation: each turn's history holds rows that only decode wrote."""
    history, cached = prompt(10, 100), []
    for turn in range(4):
        (output,) = pair.generate(history, max_new_tokens=90)
        cached.append(output.cached_tokens)
        history = history + output.output_ids + prompt(11 + turn, 25)
    assert cached == [0, 128, 256, 384]


def test_pages_are_evicted_while_others_read_a_prefix(pair: SteppedPair) -> None:
    """The reader's prefix stays; the pages behind it, in the same branch of the tree, go to somebody else."""
    prefix = prompt(20, 4 * PAGE_SIZE)
    pair.generate(prefix + prompt(21, 8 * PAGE_SIZE), max_new_tokens=20)
    reader = pair.submit(prefix + prompt(22, 10), 150)
    pair.until(lambda state: state["running"] == [reader])
    assert pair.on.state["evictable_tokens"] >= 8 * PAGE_SIZE
    newcomer = pair.submit(prompt(23, 15 * PAGE_SIZE), 40)
    state = pair.until(lambda state: len(state["running"]) == 2)
    assert 15 * PAGE_SIZE + 8 * PAGE_SIZE > POOL_TOKENS - 5 * PAGE_SIZE, "the newcomer fitted without an eviction"
    assert state["evictable_tokens"] < 8 * PAGE_SIZE
    pair.finish()
    assert pair.output(reader).cached_tokens == len(prefix)
    assert [len(pair.output(rid).output_ids) for rid in (reader, newcomer)] == [150, 40]


def test_a_retracted_request_matches_its_prefix_again(pair: SteppedPair) -> None:
    """FIELD F3. It comes back with the prompt's rows from the host pool, in whatever region is free then."""
    rids = [pair.submit(prompt(30 + i, 280 + 20 * i), 200) for i in range(4)]
    state = pair.until(lambda state: state["retracted"] > pair.retracted_before, at_most=400)
    assert state["waiting"] and state["running"]
    already = gathered(pair)
    pair.finish()
    assert gathered(pair) > already, "nothing was matched after the retraction"
    assert [len(pair.output(rid).output_ids) for rid in rids] == [200] * 4


@pytest.mark.parametrize("lengths", ((100, 100), (220, 220), (120, 120, 120)), ids=str)
def test_requests_that_insert_the_same_prefix_at_once(pair: SteppedPair, lengths: tuple[int, ...]) -> None:
    """All compute it; SGLang keeps one copy and exchanges the others' slots for it while they run."""
    text = prompt(40, max(lengths))
    rids = [pair.submit([*text[:length], 7 + i], 90) for i, length in enumerate(lengths)]
    state = pair.until(lambda state: len(state["running"]) == len(rids) and not state["chunked"])
    pages = sum((length + 1 + PAGE_SIZE) // PAGE_SIZE for length in lengths)
    used = POOL_TOKENS - state["free_tokens"] - state["evictable_tokens"]
    assert used < pages * PAGE_SIZE, "no slot was exchanged: each request still has its own copy"
    pair.finish()
    assert [pair.output(rid).cached_tokens for rid in rids] == [0] * len(rids)
    (late,) = pair.generate(text, max_new_tokens=20)
    assert late.cached_tokens >= min(lengths) // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE


def test_readers_of_a_prefix_outlive_the_request_that_wrote_it(pair: SteppedPair) -> None:
    prefix = prompt(50, 5 * PAGE_SIZE)
    writer = pair.submit(prefix + prompt(51, 5), 60)
    pair.until(lambda state: state["running"] == [writer])
    readers = [pair.submit(prefix + prompt(52 + i, 5 + 30 * i), 120) for i in range(2)]
    pair.until(lambda state: len(state["running"]) == 3)
    pair.abort(writer)
    pair.finish()
    assert [pair.output(rid).cached_tokens for rid in readers] == [len(prefix)] * 2


def test_flush_forgets_prefixes(pair: SteppedPair) -> None:
    text = prompt(60, 300)
    (first,) = pair.generate(text, max_new_tokens=30)
    assert pair.flush()
    (second,) = pair.generate(text, max_new_tokens=30)
    assert second.cached_tokens == 0 and second.output_ids == first.output_ids
