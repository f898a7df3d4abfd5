"""The fenced blocks of README.md and docs/*.md, and the commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKS = {
    "bash": {"", "run", "server", "client", "gpu"},
    "python": {"run", "client"},
    "text": {""},
    "json": {""},
    "": {""},
}
"""Languages and, behind them, what is done with the block (docs/contributing.md)."""

COMMAND_WORDS = ("hisparse", "python", "make", "pip", "curl")


class Block(NamedTuple):
    """A fenced block; `line` is where it begins."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


class Command(NamedTuple):
    """One command: variables set in front of it, and its words; `.venv/bin/` is left out."""

    block: Block
    variables: dict[str, str]
    words: list[str]

    @property
    def name(self) -> str:
        return f"{self.block.name} {' '.join(self.words)[:60]}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.M | re.S):
            language, _, mark = match[1].strip().partition(" ")
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, language, mark, match[2]))
    return found


def commands_of(block: Block) -> list[Command]:
    """Its commands; in a block without language, the lines that begin like one. Lines of a pipe are one command, of
    which the first part is looked at."""
    if block.language not in ("bash", ""):
        return []
    found = []
    for line in _whole_lines(block.text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            assert block.language == "", f"{block.name}: {line!r} is no command"
            continue
        variables = {}
        while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if not words:
            continue
        words[0] = words[0].removeprefix(".venv/bin/")
        if "|" in words:
            words = words[: words.index("|")]
        if words[0] in COMMAND_WORDS:
            found.append(Command(block, variables, words))
        else:
            assert block.language == "", f"{block.name}: {line!r} begins like no known command"
    return found


def _whole_lines(text: str) -> list[str]:
    """Lines with their continuations: behind a backslash, and within quotes."""
    lines: list[str] = []
    open_line = ""
    for line in text.splitlines():
        open_line += line
        if open_line.endswith("\\"):
            open_line = open_line[:-1] + " "
        elif open_line.count("'") % 2:
            open_line += "\n"
        else:
            lines.append(open_line)
            open_line = ""
    return [*lines, open_line] if open_line else lines


BLOCKS = blocks()
COMMANDS = [command for block in BLOCKS for command in commands_of(block)]


def serves(command: Command) -> bool:
    return command.words[:2] == ["hisparse", "serve"] or command.words[1:3] == ["-m", "sglang.launch_server"]


def server_flags(command: Command) -> list[str]:
    return command.words[2:] if command.words[0] == "hisparse" else command.words[3:]
