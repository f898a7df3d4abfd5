"""`hisparse simulate` as a user meets it, and what its figures mean."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hisparse.cli import main
from hisparse.link import swap_in_s
from hisparse.simulator.simulate import regions_of, simulate
from hisparse.simulator.synthetic import with_hit_rate
from hisparse.trace_format import Trace, write_trace

NEEDLE = Path(__file__).parents[2] / "benchmark/needle/traces"
STEPS, TOP_K, PROMPT = 60, 64, 400


def make_trace(hit_rates: tuple[float, ...], *, seeded: bool) -> Trace:
    """Layer l of one request has the l-th hit rate at a buffer of 128."""
    made = [
        with_hit_rate(top_k=TOP_K, buffer=128, hit_rate=rate, prompt_len=PROMPT, steps=STEPS, seed=layer, recent=8)
        for layer, rate in enumerate(hit_rates)
    ]
    layers = len(hit_rates)
    step, layer = np.divmod(np.arange(STEPS * layers), layers)
    seeds = {
        "seed_layer": np.arange(layers),
        "seed_request": np.zeros(layers, np.int64),
        "seeded": np.stack([one.at(slice(0, 1))[0] for one in made]),
    }
    return Trace(
        about={"page_size": 64, "top_k": TOP_K, "row_bytes": 656},
        step=step,
        layer=layer,
        request=np.zeros(len(step), np.int64),
        seq_len=PROMPT + 1 + step,
        selected=np.stack([one.at() for one in made], axis=1).reshape(-1, TOP_K),
        **(seeds if seeded else {}),
    )


@pytest.mark.parametrize("seeded", (True, False))
def test_the_hit_rate_and_what_follows_from_it(seeded: bool) -> None:
    trace = make_trace((0.75, 0.5), seeded=seeded)
    outcome = simulate(trace, regions_of(trace), buffer=128, policy="lru")
    missed = outcome.counts[:, 2].reshape(STEPS, 2)
    assert outcome.counted.sum() == 2 * STEPS - (0 if seeded else 2)
    assert missed[1:].tolist() == [[16, 32]] * (STEPS - 1)
    # Seeded with the first selection the first step misses nothing; its own token is in the tail ring.
    assert missed[0].tolist() == [0, 0]
    counted = STEPS if seeded else STEPS - 1
    assert outcome.hit_rate == pytest.approx(1 - 48 * (STEPS - 1) / (2 * 64 * counted))
    assert outcome.misses_a_selection == pytest.approx(24 * (STEPS - 1) / counted)
    assert outcome.bytes_a_step(656) == pytest.approx(48 * 656 * (STEPS - 1) / counted)
    copying, idle = swap_in_s(np.array([16.0, 32.0]) * 656, 43e9).sum(), swap_in_s(np.zeros(2), 43e9).sum()
    expected = (copying * (STEPS - 1) + idle * (counted - STEPS + 1)) / counted
    assert outcome.seconds_a_step(656, 43e9) == pytest.approx(expected)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "made.npz", make_trace((0.75,), seeded=True))
    assert main(["simulate", str(tmp_path / "made.npz"), "--buffer", "1x,128", "--policy", "lru,fifo,belady"]) == 0
    lines = capsys.readouterr().out.splitlines()
    lru = next(line.split() for line in lines if line.split()[:2] == ["128", "lru"])
    missed = 16 * (STEPS - 1) / STEPS
    assert lru[2:5] == [f"{1 - missed / TOP_K:.2%}", f"{missed:.2f}", f"{missed * 656 / 1e3:.1f}"]
    assert lru[-1] == "0%"
    assert sum(line.endswith("100%") and "belady" in line for line in lines) == 2


def test_a_recorded_trace_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", str(NEEDLE / "one_fact.npz"), "--buffer", "512", "--policy", "lru,once"]
    assert main([*arguments, "--plot", str(tmp_path / "a.png")]) == 0
    assert "88 steps, 3 layers, 10 requests" in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "sentence"),
    (
        (("--policy", "mru"), "--policy mru must be one of lru, fifo"),
        (("--policy", "lru:3"), "--policy lru:3 is not known"),
        (("--policy", ","), "--policy must name at least one"),
        (("--buffer", "0.5x"), "--buffer 0.5x is 128 rows; it must be from the trace's top-k, 256, to 32767"),
        (("--buffer", "big"), "--buffer big must be a number of rows"),
        (("--buffer", "infx"), "--buffer infx must be a number of rows"),
        (("--row-bytes", "0"), "--row-bytes 0 must be positive"),
    ),
)
def test_a_bad_option_gets_one_sentence(
    more: tuple[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(NEEDLE / "one_fact.npz"), *more]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("hisparse: error: ") and sentence in output.err and output.err.count("\n") == 1


def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(tmp_path / "none.npz")]) == 2
    assert "neither a trace" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "libcachesim", None)
    assert main(["simulate", str(NEEDLE / "one_fact.npz"), "--policy", "clock"]) == 2
    assert "pip install 'sglang-hisparse[simulate]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", str(NEEDLE / "one_fact.npz"), "--plot", "x.png"]) == 2
    assert "pip install 'sglang-hisparse[plot]'" in capsys.readouterr().err
