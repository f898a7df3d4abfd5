"""The demo's verdict: exit status and table follow from the two runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hisparse import demo
from hisparse.local_server import ServerDied

RIGHT = [demo._expected(names) for names in demo.ASKED]
ON = demo.Run(
    tokens=[["a", "b"]] * len(RIGHT),
    logprobs=[[-0.5, -0.25]] * len(RIGHT),
    answers=RIGHT,
    seconds=2.0,
    row_bytes=2**20,
    hit_rate=0.75,
    command="hisparse serve",
)
OFF = dataclasses.replace(ON, hit_rate=None, row_bytes=8 * 2**20)


def run_demo(monkeypatch: pytest.MonkeyPatch, on: demo.Run, off: demo.Run) -> int:
    monkeypatch.setattr(demo, "_run", lambda log, *flags: on if flags else off)
    return demo.demo(keep=False)


def test_equal_outputs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(monkeypatch, ON, OFF) == 0
    text = capsys.readouterr().out
    assert "12 of 12" in text and "outputs are the same" in text
    assert text.count("-> right") == len(demo.ASKED) and "WRONG" not in text


@pytest.mark.parametrize(
    "change",
    [{"tokens": [["a", "x"]] * len(RIGHT)}, {"logprobs": [[-0.5, -0.26]] * len(RIGHT)}],
    ids=["tokens", "logprobs"],
)
def test_different_outputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    assert run_demo(monkeypatch, dataclasses.replace(ON, **change), OFF) == 1  # type: ignore[arg-type]
    assert "OUTPUTS DIFFER" in capsys.readouterr().out


def test_wrong_answers_are_called_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [RIGHT[0].replace("48213", "48214"), *RIGHT[1:]]
    assert run_demo(monkeypatch, dataclasses.replace(ON, answers=wrong), OFF) == 0
    text = capsys.readouterr().out
    assert text.count("-> WRONG") == 1 and text.count("-> right") == len(RIGHT) - 1


def test_server_that_dies_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def die(log: Path, *flags: str) -> demo.Run:
        raise ServerDied("last lines")

    monkeypatch.setattr(demo, "_run", die)
    assert demo.demo(keep=False) == 1
    assert "hisparse: error: a server failed: last lines" in capsys.readouterr().err


def test_every_fact_is_in_the_text_once() -> None:
    text = demo._text()
    for name, code in demo.CODES.items():
        assert text.count(f"The access code of {name} is {code}.") == 1
