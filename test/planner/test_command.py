"""`hisparse plan` as a user meets it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hisparse.cli import main

GOOD = ["plan", "deepseek-v3.2", "--gpus", "8", "--host-memory-gib", "2000", "--context-len", "32768"]


def test_the_report_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GOOD) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith(("  weights", "  KV", "  kept back"))]
    # The GiB are the first word that is a number with three decimals.
    parts = [next(float(word) for word in row if word.count(".") == 1 and len(word.split(".")[1]) == 3) for row in rows]
    assert sum(parts) == pytest.approx(139.8, abs=0.01)
    assert "--hisparse-config '{" in text
    assert all(len(line) <= 120 for line in text.splitlines() if "launch_server" not in line)


@pytest.mark.parametrize(
    ("more", "sentence"),
    (
        ("--gpu a100", "--gpu a100 must be one of h100, h200, h20; for another GPU give --gpu-memory-gib."),
        ("--gpus 0", "--gpus 0 must be positive"),
        ("--dp-size 3", "--dp-size 3 must divide --gpus 8"),
        ("--gpus 7", "--gpus 7 with --dp-size 1 cannot share the 128 attention heads of deepseek-v3.2 evenly."),
        ("--kv-cache-dtype fp4", "--kv-cache-dtype fp4 must be bfloat16 or fp8_e4m3."),
        ("--mem-fraction-static 1.5", "--mem-fraction-static 1.5 must be between 0 and 1."),
        ("--step-ms nan", "--step-ms nan must be positive"),
        ("--buffer 1000", "device_buffer_size=1000 must be a multiple"),
        ("--context-len 200000", "are more than the 163840 tokens"),
    ),
)
def test_a_bad_option_gets_one_sentence(more: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, *more.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("hisparse: error: ") and sentence in output.err and output.err.count("\n") == 1


def test_unknown_weights_need_their_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from hisparse.planner.presets import PRESETS

    config = {**PRESETS["glm-5"], "quantization_config": {"quant_method": "nvfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), *GOOD[2:]]
    assert main(arguments) == 2
    assert "Give --weights-gib" in capsys.readouterr().err
    assert main([*arguments, "--weights-gib", "50"]) == 0
    assert "50.000" in capsys.readouterr().out


def test_the_picture(tmp_path: Path) -> None:
    assert main([*GOOD, "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*GOOD, "--plot", str(tmp_path / "plan.png")]) == 2
    assert "pip install 'sglang-hisparse[plot]'" in capsys.readouterr().err


def test_a_picture_of_an_unknown_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--plot", str(tmp_path / "plan.xyz")]) == 2
    assert "--plot" in capsys.readouterr().err
