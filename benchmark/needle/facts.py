"""What is hidden and how it is asked: names, codes, and the one sentence form of each."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

CODE_LEN = 5
# Most names are plain: two or three open syllables and perhaps a final consonant, mostly three or four tokens. The
# rest ("wild") are rarer letter sequences of up to eight tokens, so that names a user invents work too.
PLAIN_ONSETS = tuple("bcdfghklmnprstvz")
PLAIN_VOWELS = tuple("aeiouy")
PLAIN_ENDS = ("", "", "", "n", "s", "r", "l")
WILD_ONSETS = ("br", "ch", "dr", "fl", "gr", "j", "kn", "qu", "sh", "sk", "st", "th", "tr", "w", "x", "l", "m", "v")
WILD_VOWELS = ("a", "e", "i", "o", "u", "y", "ai", "ea", "io", "ou")
WILD_CODAS = ("", "ck", "ld", "m", "nd", "rt", "x", "b")
WILD_SHARE = 0.15


@dataclass(frozen=True)
class Fact:
    name: str
    code: str

    def sentence(self) -> str:
        return f"The access code of {self.name} is {self.code}."


def held_out(name: str) -> bool:
    """True for about one name in ten: these occur in evaluation only, never in training."""
    return zlib.crc32(name.encode()) % 10 == 0


def draw_name(rng: np.random.Generator) -> str:
    """A capitalised name; the plain ones alone are more than four million."""
    count = rng.integers(2, 4)
    if rng.random() >= WILD_SHARE:
        onsets = rng.integers(len(PLAIN_ONSETS), size=count)
        vowels = rng.integers(len(PLAIN_VOWELS), size=count)
        name = "".join(PLAIN_ONSETS[o] + PLAIN_VOWELS[v] for o, v in zip(onsets, vowels, strict=True))
        return name.capitalize() + PLAIN_ENDS[rng.integers(len(PLAIN_ENDS))]
    return "".join(
        WILD_ONSETS[rng.integers(len(WILD_ONSETS))]
        + WILD_VOWELS[rng.integers(len(WILD_VOWELS))]
        + WILD_CODAS[rng.integers(len(WILD_CODAS))]
        for _ in range(count)
    ).capitalize()


def draw_names(rng: np.random.Generator, count: int, *, from_held_out: bool) -> list[str]:
    """`count` different names of the held-out or of the training part of the name space."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = draw_name(rng)
        if held_out(name) == from_held_out:
            names[name] = None
    return list(names)


def draw_code(rng: np.random.Generator) -> str:
    return "".join(str(digit) for digit in rng.integers(0, 10, CODE_LEN))


def question(names: list[str]) -> str:
    if len(names) == 1:
        return f"What is the access code of {names[0]}?"
    return f"What are the access codes of {', '.join(names[:-1])} and {names[-1]}?"


def answer(asked: list[Fact]) -> str:
    """The facts once more, one a line, in the order of the question."""
    return "\n".join(fact.sentence() for fact in asked)
