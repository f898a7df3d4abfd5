"""The filler text: docstrings of Python's standard library, read from the running interpreter.

No text is shipped and none is downloaded. The docstrings are licensed as CPython is (PSF License Agreement,
version 2). Another Python version gives slightly different filler, which changes neither tokenizer nor weights.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Not part of every installation (split packages), or not prose.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "turtledemo"}
MIN_LINE_LEN = 30
MAX_LINE_LEN = 400
HELD_OUT_SHARE = 0.1


def docstrings(stdlib: Path) -> Iterator[str]:
    """Every docstring below `stdlib`, in the order of the sorted file paths."""
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).parts
        if LEFT_OUT.intersection(parts) or parts[0].startswith(("config-", "lib-dynload")):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def lines(stdlib: Path | None = None) -> list[str]:
    """Paragraphs of prose as single lines: ASCII, no runs of white space, no duplicates, 30 to 400 characters.

    Since a line starts and ends with a character that is not white space, tokens never span a line break:
    the tokens of joined lines are the joined tokens of the lines.
    """
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    seen: dict[str, None] = {}
    for text in docstrings(stdlib):
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            if line.isascii() and MIN_LINE_LEN <= len(line) <= MAX_LINE_LEN and ">>>" not in line:
                seen[line] = None
    return list(seen)


def split(all_lines: list[str]) -> tuple[list[str], list[str]]:
    """(training lines, held-out lines); the held-out part is the last tenth."""
    cut = int(len(all_lines) * (1 - HELD_OUT_SHARE))
    return all_lines[:cut], all_lines[cut:]
