"""Commands of the documentation: those that need neither GPU nor server are run as they stand, the others parsed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse.bench import command as bench
from hisparse.cli import main
from hisparse.cpu.environment import cpu_environment, cpu_server_args

from .blocks import BLOCKS, COMMANDS, MARKS, PAGES, ROOT, Block, Command, server_flags, serves

RUN = [command for command in COMMANDS if command.block.mark == "run"]
PARSED = [command for command in COMMANDS if command.block.mark != "run" and not serves(command)]
SERVERS = [command for command in COMMANDS if serves(command)]
SNIPPETS = [block for block in BLOCKS if (block.language, block.mark) == ("python", "run")]


def test_there_is_something_of_every_kind() -> None:
    assert {(block.language, block.mark) for block in BLOCKS} >= {
        ("bash", "server"),
        ("bash", "client"),
        ("bash", "gpu"),
    }
    assert {command.words[1] for command in RUN} == {"plan", "simulate", "bench"}
    assert SNIPPETS and PARSED and len(SERVERS) > 5


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_is_marked(block: Block) -> None:
    assert block.mark in MARKS.get(block.language, ()), f"unknown: ```{block.language} {block.mark}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_hides_in_an_indented_block(page: Path) -> None:
    outside = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    assert not re.search(r"^    (\.venv/bin/)?(hisparse|python|make|pip) ", outside, re.M)


@pytest.mark.parametrize("command", RUN, ids=lambda command: command.name)
def test_a_command_runs_as_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Pictures go to the current folder, the repository's files are found from it.
    for name in ("models", "benchmark"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "cuda_devices", lambda: 0)
    assert command.words[0] == "hisparse", "only these can run in this process"
    assert main(command.words[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


PLANNED = [
    (command, following)
    for command, following in itertools.pairwise(COMMANDS)
    if command.words[1] == "plan" and serves(following) and following.block.mark == "gpu"
]


@pytest.mark.parametrize(("plan", "server"), PLANNED, ids=lambda command: command.name)
def test_the_planner_prints_the_documented_command(
    plan: Command, server: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(plan.words[1:]) == 0
    (printed,) = re.findall(r"^ +(python -m sglang.launch_server .*)$", capsys.readouterr().out, re.M)
    words = shlex.split(printed)
    (ours, documented) = (json.loads(command.pop()) for command in (words, list(server.words)))
    assert words == server.words[:-1]
    assert documented == pytest.approx(ours, rel=0.01)


def test_both_plans_for_eight_gpus_are_compared() -> None:
    assert len(PLANNED) >= 2


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: block.name)
def test_a_snippet_runs_as_written(block: Block) -> None:
    result = subprocess.run([sys.executable, "-c", block.text], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("command", PARSED, ids=lambda command: command.name)
def test_what_a_command_names_is_there(command: Command) -> None:
    CHECKS[command.words[0]](command.words[1:])


def check_hisparse(words: list[str]) -> None:
    if words[0] in ("doctor", "demo"):  # test/unit/test_cli.py and test_demo.py run them
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])
        assert end.value.code == 0
        return
    with pytest.raises(AssertionError, match="parsed"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"hisparse.{'simulator' if words[0] == 'simulate' else 'planner'}.command._run", stop)
        main(words)


def stop(*_: object) -> None:
    raise AssertionError("parsed")


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert all(word in targets or "=" in word for word in words), words


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        if named := re.fullmatch(r"(?:sglang-hisparse|\.)\[(\w+)\]", word):
            assert named[1] in extras
        elif word.endswith(".txt"):
            assert (ROOT / word).is_file(), word


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "pip"]:
        check_pip(words[2:])
    elif words[:2] == ["-m", "pytest"]:
        paths = [word for word in words[2:] if word.startswith("test")]
        assert paths and all((ROOT / path).exists() for path in paths), paths
    else:
        script = ROOT / words[0]
        assert script.is_file(), words[0]
        source = script.read_text()
        for word in words[1:]:
            flag = word.partition("=")[0]
            positive = f'"{flag.replace("--no-", "--", 1)}"'
            known = f'"{flag}"' in source or (positive in source and "BooleanOptionalAction" in source)
            assert not flag.startswith("--") or known, f"{words[0]} has no {flag}"


def check_curl(words: list[str]) -> None:
    assert any(word.startswith("http://127.0.0.1:") for word in words)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "hisparse": check_hisparse, "make": check_make, "pip": check_pip, "python": check_python, "curl": check_curl,
}  # fmt: skip

PARSE_SERVERS = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
from hisparse.config import HiSparseConfig
from hisparse.plugin.server_args import refuse_unsupported
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
for flags in json.load(sys.stdin):
    arguments = parser.parse_args(flags)
    if arguments.enable_hisparse:
        refuse_unsupported(arguments)
        needle = "needle" in arguments.model_path and "index_topk" not in arguments.json_model_override_args
        HiSparseConfig.from_json(arguments.hisparse_config).resolve(
            index_topk=256 if needle else 2048, page_size=64, context_len=arguments.context_length or 131072
        )
    print(flush=True)
"""
"""SGLang's parser, then what the plug-in refuses before it knows the model, then its keys."""


def test_sglang_takes_the_flags_of_every_server() -> None:
    """In one process, since importing SGLang takes seconds; it stops at the first that does not pass."""
    result = subprocess.run(
        [sys.executable, "-c", PARSE_SERVERS],
        input=json.dumps([server_flags(command) for command in SERVERS]),
        env={**os.environ, **cpu_environment(), "SGLANG_PLUGINS": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    passed = result.stdout.count("\n")
    assert passed == len(SERVERS), f"{SERVERS[passed].name}\n{result.stderr[-2000:]}"


@pytest.mark.parametrize("command", SERVERS, ids=lambda command: command.name)
def test_a_server_without_a_gpu_takes_its_flags(command: Command) -> None:
    """`hisparse serve` of a block that is not a GPU's passes its own checks."""
    if command.block.mark != "gpu" and command.words[0] == "hisparse":
        cpu_server_args(server_flags(command))
    assert "--enable-hisparse" in command.words
