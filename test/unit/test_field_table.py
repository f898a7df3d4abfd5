"""Every test that docs/field-tests.md names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/field-tests.md").read_text()
NAMED = sorted(set(re.findall(r"`(test/[\w/]+\.py)::(\w+)`", TABLE)))
LEFT_OUT = {11, 12, 13, 14, 27, 28, 29}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: str(part).rsplit("/", 1)[-1])
def test_the_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_a_test_or_a_reason() -> None:
    rows = dict(re.findall(r"^\| F(\d+) \|(.*)\|$", TABLE, re.M))
    assert {int(number) for number in rows} >= set(range(1, 30)) - LEFT_OUT
    for number, row in rows.items():
        assert "::test_" in row or int(number) in LEFT_OUT, f"F{number} names no test"


def test_nothing_is_named_in_another_form() -> None:
    assert len(re.findall(r"::test_\w+", TABLE)) == len(re.findall(r"`test/[\w/]+\.py::\w+`", TABLE)) > len(NAMED) / 2
