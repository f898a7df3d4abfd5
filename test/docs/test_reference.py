"""What the pages list is what the code has: keys, variables, refused options, sentences, options of the commands."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hisparse.budget import MemoryBudget
from hisparse.cli import main
from hisparse.config import DEFAULT_TRACE_MIB, MAX_DEVICE_BUFFER_SIZE, HiSparseConfig
from hisparse.cpu.environment import LEGAL, REFUSED, VARIABLES
from hisparse.plugin.gate import SUPPORTED_SGLANG
from hisparse.plugin.server_args import BACKEND_FOR_DTYPE, UNSUPPORTED

from .blocks import ROOT
from .messages import every_text, refusals, says

CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
CONTRIBUTING = (ROOT / "docs/contributing.md").read_text()
COMPATIBILITY = (ROOT / "docs/compatibility.md").read_text()
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()


def section(page: str, title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found, f"no section {title}"
    return found[1]


def first_column(text: str) -> list[list[str]]:
    """What stands in backticks in the first cell of each row of the tables."""
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in re.findall(r"^\|.*\|$", text, re.M)]


def test_every_key_is_explained_and_no_other() -> None:
    keys = [names[0] for names in first_column(section(CONFIGURATION, "Keys of `--hisparse-config`")) if names]
    assert sorted(keys) == sorted(field.name for field in dataclasses.fields(HiSparseConfig))


def test_values_of_the_keys() -> None:
    keys = section(CONFIGURATION, "Keys of `--hisparse-config`")
    rows = {row.split("`")[1]: row for row in re.findall(r"^\| `\w+`.*$", keys, re.M)}
    resolved = HiSparseConfig().resolve(index_topk=2048, page_size=64, context_len=1000)
    assert resolved.device_buffer_size == 2 * 2048 and "2 x the model's `index_topk`" in rows["device_buffer_size"]
    assert f"{MAX_DEVICE_BUFFER_SIZE // 64 * 64:,}" in rows["device_buffer_size"]
    assert resolved.workspace_tokens == 1024 and "one token more, rounded up to 64" in rows["workspace_tokens"]
    assert f"| {DEFAULT_TRACE_MIB} |" in rows["trace_mib"]


def test_the_table_at_start_up_looks_like_that() -> None:
    config = HiSparseConfig(device_buffer_size=128).resolve(index_topk=64, page_size=64, context_len=8192, workspaces=1)
    budget = MemoryBudget(config, layers=2, row_bytes=384, index_key_bytes=132, regions=9, slots=16_384)
    shown = section((ROOT / "docs/operating.md").read_text(), "The table at start-up")
    assert f"```text\n{budget.table()}\n```" in shown


def test_every_variable_is_explained_and_no_other() -> None:
    """Ours by their prefix, wherever they are read or set."""
    places = [
        path for folder in ("python", "sgl-kernel", "test", "benchmark") for path in (ROOT / folder).rglob("*.py")
    ]
    variable = re.compile(r"""["'](HISPARSE_[A-Z0-9_]+|NEEDLE_[A-Z]+)["']|(HISPARSE_[A-Z]+_[A-Z]+)=""")
    used = {a or b for path in (*places, ROOT / "Makefile") for a, b in variable.findall(path.read_text())}
    explained = set(re.findall(r"`(HISPARSE_[A-Z0-9_]+|NEEDLE_[A-Z]+)`", CONFIGURATION + CONTRIBUTING))
    assert used == explained


def test_variables_that_serve_sets_are_named() -> None:
    for setting in VARIABLES:
        assert f"`{setting.name}`" in CONFIGURATION


def test_every_refused_option_is_listed_and_no_other() -> None:
    ours, without_gpu = section(COMPATIBILITY, "Refused").split("Without a GPU")
    options = {option.split()[0] for names in first_column(ours) for option in names if option.startswith("--")}
    assert options == {feature.option for feature in UNSUPPORTED} | {"--page-size", "--kv-cache-dtype"}
    for setting in (*REFUSED, *LEGAL):
        if setting.name not in ("--page-size", "--tensor-parallel-size", "--tp", "--data-parallel-size", "--dp"):
            assert f"`{setting.name}`" in without_gpu, setting.name


def test_versions_and_back_ends() -> None:
    assert SUPPORTED_SGLANG in COMPATIBILITY
    for dtype, backend in BACKEND_FOR_DTYPE.items():
        assert dtype in CONFIGURATION and backend in CONFIGURATION and backend in COMPATIBILITY


SENTENCES = section(TROUBLESHOOTING, "It does not start").partition("| what you see |")[0]
DOCUMENTED = [name for names in first_column(SENTENCES) for name in names]


@pytest.mark.parametrize("message", refusals())
def test_every_sentence_is_explained(message: str) -> None:
    assert any(says(message, sentence) for sentence in DOCUMENTED), message


@pytest.mark.parametrize("sentence", DOCUMENTED)
def test_every_explained_sentence_exists(sentence: str) -> None:
    assert any(says(text, sentence) for text in every_text()), sentence


def test_every_command_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z]+)  ", capsys.readouterr().out, re.M)
    assert {"serve", "doctor", "demo"} < set(commands)
    table = section((ROOT / "docs/operating.md").read_text(), "Commands")
    assert sorted(name.removeprefix("hisparse ") for names in first_column(table) for name in names) == sorted(commands)


@pytest.mark.parametrize("command", ["plan", "simulate", "bench"])
def test_every_option_of_a_command_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = section((ROOT / "docs/planning.md").read_text(), command)
    for option in options - {"--tp-size"} if command == "plan" else options:  # an alias
        assert re.search(rf"{option}(?![\w-])", page), f"{option} of hisparse {command}"
