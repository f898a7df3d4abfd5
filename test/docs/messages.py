"""The sentences with which a server refuses to start, read from the source; HOLE stands for a value."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOLE = "\N{OBJECT REPLACEMENT CHARACTER}"
MODULES = (
    "config.py", "budget.py", "memory/host_pool.py", "plugin/server_args.py", "plugin/sizing.py", "plugin/tracing.py",
    "plugin/gate.py",
)  # fmt: skip
"""What a starting server goes through."""


def refusals() -> list[str]:
    """Every message of a `HiSparseError`, and the gate's sentences."""
    found = []
    for module in MODULES:
        tree = ast.parse((ROOT / "python/hisparse" / module).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "HiSparseError":
                found.append(text_of(node.args[0]))
            if isinstance(node, ast.FunctionDef) and node.name == "problems":
                found += [text_of(part) for part in _listed(node)]
    return [message for message in found if message.strip(HOLE)]


def _listed(function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            yield from node.value.elts
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.ListComp):
            yield node.value.elt


def text_of(message: ast.expr) -> str:
    """A string expression with HOLE for whatever is filled in, but the key's name in `_key(name, value)`."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(text_of(part) for part in message.values)
    if isinstance(message, ast.FormattedValue):
        return text_of(message.value)
    if isinstance(message, ast.IfExp):
        return text_of(message.body)
    if isinstance(message, ast.BinOp):
        return text_of(message.left) + text_of(message.right)
    if (
        isinstance(message, ast.Call)
        and ast.unparse(message.func) == "_key"
        and isinstance(message.args[0], ast.Constant)
    ):
        return f"--hisparse-config {message.args[0].value}={HOLE}"
    return HOLE


@functools.cache
def every_text() -> tuple[str, ...]:
    """All strings of the packages."""
    found = []
    for folder in ("python", "sgl-kernel"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant | ast.JoinedStr) and (text := text_of(node)).strip(HOLE):
                    found.append(text)
    return (*found, *refusals())


def says(message: str, sentence: str) -> bool:
    """Whether a documented sentence, `...` for values, is part of a message."""
    pieces = [re.escape(piece) for piece in sentence.removeprefix("... ").removesuffix(" ...").split("...")]
    return re.search(".*?".join(pieces), message) is not None
