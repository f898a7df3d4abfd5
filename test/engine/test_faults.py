"""Requests that are aborted, tiny, huge or in the way; afterwards nothing is lost and the next answers are right.

`SteppedPair.finish` holds the conservation law, and that SGLang's leak check and our integrity check have run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..e2e.pair import HISPARSE_FLAGS, prompt
from .stepped import CHUNK, LONGEST_PROMPT, REGIONS, EngineDied, SteppedEngine, SteppedPair, common_flags

LONG = prompt(1, 4 * CHUNK)


def queued(pair: SteppedPair) -> str:
    others = [pair.submit(prompt(2 + i, 30), 60) for i in range(REGIONS)]
    pair.until(lambda state: sorted(state["running"]) == sorted(others))
    rid = pair.submit(LONG, 20)
    assert pair.step(2)["waiting"] == [rid]
    return rid


def not_yet_seen(pair: SteppedPair) -> str:
    return pair.submit(LONG, 20)


def first_chunk(pair: SteppedPair) -> str:
    rid = pair.submit(LONG, 20)
    assert pair.step()["chunked"] == rid
    return rid


def between_chunks(pair: SteppedPair) -> str:
    """While another request decodes."""
    other = pair.submit(prompt(7, 40), 80)
    pair.until(lambda state: state["running"] == [other])
    rid = pair.submit(LONG, 20)
    assert pair.step(3)["chunked"] == rid
    return rid


def last_chunk(pair: SteppedPair) -> str:
    rid = pair.submit(LONG, 20)
    pair.until(lambda state: state["chunked"] is None)
    assert not pair.output(rid).output_ids
    return rid


def decoding(pair: SteppedPair) -> str:
    rid = pair.submit(prompt(8, 300), 200)
    pair.step(50)
    assert pair.on.state["running"] == [rid]
    return rid


def last_step(pair: SteppedPair) -> str:
    """Its last token is computed and not yet taken from the queue of results (overlap scheduling)."""
    rid = pair.submit(prompt(9, 70), 10)
    pair.step(10)
    assert not pair.output(rid).finished
    return rid


def finished(pair: SteppedPair) -> str:
    rid = pair.submit(prompt(10, 70), 10)
    pair.until(lambda state: bool(pair.output(rid).finished))
    return rid


def retracted(pair: SteppedPair) -> str:
    for i in range(REGIONS):
        pair.submit(prompt(20 + i, 280 + 20 * i), 200)
    ran: set[str] = set()
    for _ in range(400):
        state = pair.step()
        ran.update(state["running"])
        if back := ran.intersection(state["waiting"]):
            return min(back)
    raise AssertionError("nothing was retracted")


PHASES = (
    not_yet_seen,
    queued,
    first_chunk,
    between_chunks,
    last_chunk,
    decoding,
    last_step,
    finished,
    retracted,
)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_abort_in_every_phase(pair: SteppedPair, phase: Callable[[SteppedPair], str]) -> None:
    """FIELD F25. Somebody else gets its region and its slots in the same iteration, and later its prompt matches."""
    rid = phase(pair)
    pair.abort(rid)
    heirs = [pair.submit(prompt(50 + i, 100 + 90 * i), 30) for i in range(2)]
    pair.finish()
    expected = "length" if phase is finished else "abort"
    assert pair.output(rid).finished == expected
    assert [pair.output(heir).finished for heir in heirs] == ["length"] * 2
    pair.generate(LONG, prompt(8, 310), max_new_tokens=10)


def test_all_are_aborted_at_once(pair: SteppedPair) -> None:
    rids = [pair.submit(prompt(60 + i, 100 + 100 * i), 100) for i in range(2 * REGIONS)]
    pair.step(30)
    for rid in rids:
        pair.abort(rid)
    pair.finish()
    assert {pair.output(rid).finished for rid in rids} <= {"abort", "length"}
    pair.generate(*(prompt(70 + i, 150) for i in range(REGIONS)), max_new_tokens=30)


@pytest.mark.parametrize("max_new_tokens", (0, 1))
@pytest.mark.parametrize("length", (1, LONGEST_PROMPT))
def test_hardly_any_output(pair: SteppedPair, length: int, max_new_tokens: int) -> None:
    """Also twice in one batch with a request that goes on, whose region is reset by none of them."""
    longer = pair.submit(prompt(80, 100), 30)
    pair.step(5)
    for output in pair.generate(prompt(81, length), prompt(82, min(length, 200)), max_new_tokens=max_new_tokens):
        assert output.finished == "length" and len(output.output_ids) <= max(1, max_new_tokens)
    assert len(pair.output(longer).output_ids) == 30


def test_flush_under_load_is_refused_and_harms_nothing(pair: SteppedPair) -> None:
    rids = [pair.submit(prompt(90 + i, 200 + 150 * i), 60) for i in range(REGIONS + 1)]
    for _ in range(10):
        pair.step(5)
        assert not pair.flush()
    pair.finish()
    assert [len(pair.output(rid).output_ids) for rid in rids] == [60] * len(rids)
    assert pair.flush()


def test_the_leak_check_is_active(checkpoint: Path, tmp_path: Path) -> None:
    """SGLang switches it off for its own HiSparse. One page, lost on purpose, ends the scheduler."""
    with SteppedEngine(checkpoint, *common_flags(), *HISPARSE_FLAGS, log=tmp_path / "log") as engine:
        engine.receive()
        engine.send([{"kind": "leak a page"}], 3, until_idle=False)
        with pytest.raises(EngineDied, match="memory leak detected"):
            engine.receive()
