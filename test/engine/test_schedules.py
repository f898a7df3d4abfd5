"""The same histories under SGLang's other schedules: overlap off, no radix cache, mixed chunks.

All other tests of this folder run with overlap on, SGLang's default: a step is launched before the results of the one
before it are known, so a finished or aborted request takes part in one more step, whose rows must reach nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..e2e.pair import prompt
from .stepped import CHUNK, REGIONS, SteppedPair, start_stepped_pair

SCHEDULES = {
    "overlap off": ("--disable-overlap-schedule",),
    "mixed chunks": ("--enable-mixed-chunk",),
}


@pytest.fixture(scope="module", params=SCHEDULES, ids=lambda name: name.replace(" ", "_"))
def scheduled(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SteppedPair]:
    with start_stepped_pair(checkpoint, tmp_path_factory.mktemp("schedule"), *SCHEDULES[request.param]) as pair:
        assert pair.on.state["overlap"] == (request.param != "overlap off")
        yield pair


def everything(pair: SteppedPair, radix: bool) -> None:
    """Chunks, a shared prefix, aborts, more requests than regions, a full pool."""
    prefix = prompt(1, 300)
    (first,) = pair.generate(prefix + prompt(2, 20), max_new_tokens=60)
    (second,) = pair.generate(prefix + prompt(3, 40), max_new_tokens=60)
    assert (first.cached_tokens, second.cached_tokens) == (0, 256 if radix else 0)
    rids = [pair.submit(prompt(10 + i, 280 + 20 * i), 170) for i in range(REGIONS)]
    long = pair.submit(prompt(20, 3 * CHUNK), 40)
    short = [pair.submit(prompt(30 + i, 1 + 50 * i), 25) for i in range(3)]
    pair.step(25)
    pair.abort(rids[1])
    pair.step(50)
    pair.abort(short[0])
    pair.finish()
    assert pair.output(rids[1]).finished == "abort"
    finished = [rids[0], *rids[2:], long, *short[1:]]
    assert {pair.output(rid).finished for rid in finished} == {"length"}


def test_everything_at_once(scheduled: SteppedPair) -> None:
    everything(scheduled, radix=True)


def test_everything_at_once_without_radix_cache(without_radix: SteppedPair) -> None:
    assert without_radix.on.state["overlap"]
    everything(without_radix, radix=False)


def test_everything_at_once_with_overlap(pair: SteppedPair) -> None:
    assert pair.on.state["overlap"]
    everything(pair, radix=True)
