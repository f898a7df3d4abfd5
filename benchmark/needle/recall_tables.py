"""Answers of several servers to the same questions: recall by depth, and what equals what."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ON, OFF = "HiSparse", "top-k 256"


class Cell(NamedTuple):
    """Counts of questions of one configuration, length (tokens) and depth.

    `same` are those whose tokens and log probabilities equal those of the server without HiSparse; None where they
    are not comparable. `tokens` is how many output tokens were compared.
    """

    configuration: str
    length: int
    depth: float
    questions: int
    right: int
    same: int | None
    tokens: int


def read(answers: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []


def cells(lines: list[dict[str, Any]]) -> list[Cell]:
    """One a configuration, length and depth, sorted by length."""
    plain = {(line["length"], line["seed"]): line["answers"] for line in lines if line["configuration"] == OFF}
    counts: dict[tuple[str, int, float], Counter[str]] = {}
    for line in sorted(lines, key=lambda line: line["length"]):
        theirs = plain.get((line["length"], line["seed"]))
        for index, answer in enumerate(line["answers"]):
            count = counts.setdefault((line["configuration"], line["length"], answer["depth"]), Counter())
            count["questions"] += 1
            count["right"] += answer["right"]
            if line["configuration"] == ON and theirs is not None:
                count["compared"] += 1
                count["tokens"] += len(answer["tokens"])
                count["same"] += all(answer[part] == theirs[index][part] for part in ("tokens", "logprobs"))
    return [
        Cell(*key, c["questions"], c["right"], c["same"] if c["compared"] == c["questions"] else None, c["tokens"])
        for key, c in counts.items()
    ]


def markdown(all_cells: list[Cell]) -> str:
    """A row a length and configuration, a column a depth: right answers of questions, and whether on equals off."""
    depths = sorted({cell.depth for cell in all_cells})
    rows = ["| tokens | attention | " + " | ".join(f"depth {d:g}" for d in depths) + " | all | equal to off |"]
    rows.append("|" + "---|" * (len(depths) + 4))
    for length in sorted({cell.length for cell in all_cells}):
        for configuration in sorted({cell.configuration for cell in all_cells}, key=_order):
            here = {c.depth: c for c in all_cells if (c.configuration, c.length) == (configuration, length)}
            if not here:
                continue
            shown = [f"{here[d].right}/{here[d].questions}" if d in here else "" for d in depths]
            right, asked = sum(c.right for c in here.values()), sum(c.questions for c in here.values())
            same = [c.same for c in here.values() if c.same is not None]
            equal = f"{sum(same)}/{asked} answers, {sum(c.tokens for c in here.values())} tokens" if same else ""
            rows.append(f"| {length:,} | {configuration} | {' | '.join(shown)} | {right / asked:.1%} | {equal} |")
    return "\n".join(rows)


def _order(configuration: str) -> tuple[int, str]:
    known = ("dense", OFF, ON)
    return (known.index(configuration) if configuration in known else len(known), configuration)
