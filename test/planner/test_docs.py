"""The commands in docs/planning.md and docs/policy-study.md work as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hisparse.bench import command as bench
from hisparse.cli import main

ROOT = Path(__file__).parents[2]


def commands(page: str) -> list[list[str]]:
    """Arguments of every `hisparse plan`, `simulate` and `bench` in the page's code blocks."""
    found = []
    for block in re.findall(r"```\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["hisparse"] and words[1:2] in (["plan"], ["simulate"], ["bench"]):
                found.append(words[1:])
    return found


def test_the_commands_are_found() -> None:
    assert {words[0] for words in commands("planning.md")} == {"plan", "simulate", "bench"}


@pytest.mark.parametrize("words", commands("planning.md") + commands("policy-study.md"), ids=" ".join)
def test_a_command_works_as_written(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Pictures go to the current folder, the repository's files are found from it.
    for name in ("models", "benchmark"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "cuda_devices", lambda: 0)
    assert main(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
