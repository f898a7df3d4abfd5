"""Random histories of requests: HiSparse on and off agree in every token and in every state of the scheduler.

A failure ends with a script of calls; put it below `with pairs.get()` in a test of its own to keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule

from ..e2e.pair import DEVICE_BUFFER_SIZE, INDEX_TOPK, prompt
from ..fuzz import fuzz
from .stepped import CHUNK, CONTEXT, PAGE_SIZE, POOL_TOKENS, SteppedPair, start_stepped_pair

EDGES = (1, INDEX_TOPK, DEVICE_BUFFER_SIZE, DEVICE_BUFFER_SIZE + PAGE_SIZE, CHUNK, 2 * CHUNK, PAGE_SIZE, 8 * PAGE_SIZE)
LONGEST = CONTEXT - 2

lengths = st.builds(lambda edge, off: max(1, edge + off), st.sampled_from(EDGES), st.integers(-1, 1)) | st.integers(
    1, LONGEST
)
outputs = st.sampled_from((0, 1, 2, 5, 20, PAGE_SIZE - 1, PAGE_SIZE + 1, 150, 220))


class Pairs:
    """The pair in use: the shared one, and after a failure (which ends it) one of our own."""

    def __init__(self, shared: SteppedPair, start: Callable[[ExitStack], SteppedPair]) -> None:
        self._start, self._stack, self._pair = start, ExitStack(), shared

    def get(self) -> SteppedPair:
        """Idle, with empty caches."""
        try:
            self._pair.start_over()
        except AssertionError:
            self._stack.close()
            self._pair = self._start(self._stack)
        return self._pair

    def close(self) -> None:
        self._stack.close()


class Requests(RuleBasedStateMachine):
    pairs: ClassVar[Pairs]
    texts = Bundle("texts")
    alive = Bundle("alive")

    def __init__(self) -> None:
        super().__init__()
        self.pair = self.pairs.get()
        self.prompts: dict[str, list[int]] = {}

    @initialize(target=texts)
    def first_text(self) -> list[int]:
        return prompt(0, 300)

    @rule(target=texts, seed=st.integers(1, 5), length=lengths)
    def new_text(self, seed: int, length: int) -> list[int]:
        return prompt(seed, length)

    @rule(target=texts, text=texts, keep=lengths, seed=st.integers(1, 5), more=st.integers(1, 200))
    def branch(self, text: list[int], keep: int, seed: int, more: int) -> list[int]:
        """A text that begins like another."""
        return (text[:keep] + prompt(100 + seed, more))[:LONGEST]

    @rule(target=texts, rid=alive)
    def answer_back(self, rid: str) -> list[int]:
        """A conversation's next turn: prompt, answer, something new."""
        return (self.prompts[rid] + self.pair.output(rid).output_ids + prompt(7, 30))[:LONGEST]

    @rule(target=alive, text=texts, max_new_tokens=outputs)
    def submit(self, text: list[int], max_new_tokens: int) -> str:
        rid = self.pair.submit(text, max_new_tokens)
        self.prompts[rid] = text
        return rid

    @rule(target=alive, texts=st.lists(texts, min_size=2, max_size=5), max_new_tokens=outputs)
    def submit_together(self, texts: list[list[int]], max_new_tokens: int) -> object:
        return multiple(*(self.submit(text, max_new_tokens) for text in texts))

    @rule(rid=consumes(alive))
    def abort(self, rid: str) -> None:
        self.pair.abort(rid)

    @rule(steps=st.integers(1, 4) | st.integers(5, 50))
    def run(self, steps: int) -> None:
        self.pair.step(steps)

    @rule()
    def finish(self) -> None:
        self.pair.finish()

    @rule()
    def flush(self) -> None:
        self.pair.flush()

    def teardown(self) -> None:
        if not self.pair.usable:
            return
        self.pair.finish()
        for rid in self.prompts:
            assert self.pair.output(rid).finished, f"{rid} never finished"


@pytest.mark.parametrize(
    ("fixture", "flags", "seconds"),
    (("pair", (), 40), ("without_radix", ("--disable-radix-cache",), 20)),
    ids=("radix", "no radix"),
)
def test_random_histories(
    fixture: str,
    flags: tuple[str, ...],
    seconds: float,
    request: pytest.FixtureRequest,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    def start(stack: ExitStack) -> SteppedPair:
        return stack.enter_context(start_stepped_pair(checkpoint, tmp_path, *flags))

    assert POOL_TOKENS < 2 * CONTEXT, "two long requests must not fit, so that requests are retracted"
    Requests.pairs = Pairs(request.getfixturevalue(fixture), start)
    try:
        fuzz(Requests, seconds=seconds, examples=5, steps=20)
    finally:
        Requests.pairs.close()
