"""The arithmetic of the serving benchmark; its servers need a GPU."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

SERVING = Path(__file__).parents[2] / "benchmark" / "serving"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SERVING))


def test_a_window_counts_what_arrived_inside() -> None:
    from stream_client import Stream, Window

    streams = [Stream(0.0, [0.5, 1.0, 1.2, 1.5, 3.0]), Stream(0.0, [0.1]), Stream(0.0, [1.9])]
    window = Window.of(streams, 1.0, 2.0)
    assert (window.running, window.tokens) == (2, 4)
    assert window.gaps == pytest.approx([0.2, 0.3])
    assert window.gap_ms(0.5) == pytest.approx(300) and window.gap_ms(0.99) == pytest.approx(300)
    assert streams[0].ttft == 0.5


@pytest.mark.parametrize("budget_gib", [1.0, 4.75, 20.0])
def test_every_server_keeps_to_the_budget(budget_gib: float) -> None:
    from modes import INDEX_KEY_BYTES, ROW_BYTES, plan_modes

    options = argparse.Namespace(
        budget_gib=budget_gib, prompt=32_768, new=6000, levels=[1, 16, 64], layers=8, buffer=4096,
        modes=["off", "builtin", "ours"],
    )  # fmt: skip
    off, builtin, ours = plan_modes(options, Path("selection"))
    assert off.sizes["tokens"] * 8 * (ROW_BYTES + INDEX_KEY_BYTES) <= budget_gib * 2**30
    for mode in (builtin, ours):
        assert mode.sizes["device_bytes"] <= budget_gib * 2**30
        assert 1 <= mode.sizes["requests"] <= 64
        assert "--enable-hisparse" in mode.flags
    assert "hisparse" not in builtin.environment["SGLANG_PLUGINS"].split(",")
    assert "hisparse" in ours.environment["SGLANG_PLUGINS"].split(",")


def kernel(name: str, ts: float, dur: float, stream: int = 7) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": stream}


def test_profile_sums_kernels_and_shows_one_layer(tmp_path: Path) -> None:
    from profile_decode import summarise, table

    events = []
    for layer in range(4):
        at = 100.0 * layer
        events += [
            kernel("void sm90::fwd::sparse_attn_fwd_kernel<Config<1>>(Params)", at, 10),
            kernel("void hisparse::swap_in_kernel<64>(Params)", at + 40, 30, stream=8),
            kernel("bmm", at + 50, 40),
        ]
    events.append({"cat": "python_function", "name": "python/hisparse/plugin/hooks.py(1): f", "ts": 0, "dur": 8})
    trace = tmp_path / "t.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events}, file)
    summary = summarise(trace, steps=2)
    assert summary["gpu_busy_us"] == pytest.approx(4 * (10 + 50) / 2), "bmm and swap-in overlap by 20"
    assert summary["ours_on_the_host_us"] == 4
    assert ("hisparse::swap_in_kernel", 2.0, 60.0) in summary["kernels"]
    assert summary["layer"] == [
        (30.0, 30, 8, "hisparse::swap_in_kernel"),
        (40.0, 40, 7, "bmm"),
        (90.0, 10, 7, "sm90::fwd::sparse_attn_fwd_kernel"),
    ]
    assert "| 30.0 | 30.0 | 8 | hisparse::swap_in_kernel |" in table(summary)


def test_layer_shapes_are_a_config_of_the_architecture(tmp_path: Path) -> None:
    from layer_shapes import write_config

    config = json.loads((write_config(tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV32ForCausalLM"] and config["num_hidden_layers"] == 8
