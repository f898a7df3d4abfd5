"""Texts for the evaluation through a server: facts at every depth, asked for one by one."""

from __future__ import annotations

from dataclasses import dataclass

import facts
import numpy as np
from evaluate import DEPTHS, Maker


@dataclass(frozen=True)
class Question:
    depth: float
    prompt: list[int]  # tokens: the text, the question, the start of the assistant's turn
    reply: str


@dataclass(frozen=True)
class Text:
    """`prefix` is what the prompts of all questions begin with, as tokens."""

    prefix: list[int]
    questions: list[Question]
    facts: list[facts.Fact]

    def prompt(self, maker: Maker, names: list[str]) -> list[int]:
        """The text with one question for all `names`."""
        ids = maker.ids("\n" + facts.question(names) + "<|end|><|assistant|>")
        return self.prefix + ids


def make_text(maker: Maker, length: int, seed: int, facts_a_depth: int) -> Text:
    """A text whose prompts have at most `length` tokens and are short of it by less than a line and a long name.

    The facts of a depth follow each other, a line each, in the order of `questions`. Names
    and filler are ones that training never saw. The same arguments give the same text.
    """
    rng = np.random.default_rng([seed, length])
    depths = [depth for depth in DEPTHS for _ in range(facts_a_depth)]
    stated = [facts.Fact(n, facts.draw_code(rng)) for n in facts.draw_names(rng, len(depths), from_held_out=True)]
    longest = max((facts.question([fact.name]) for fact in stated), key=lambda text: len(maker.ids(text)))
    fixed = "\n".join([*(fact.sentence() for fact in stated), longest])
    room = length - len(maker.ids(f"<|bos|><|user|>{fixed}<|end|><|assistant|>"))
    lines: list[str] = []
    at = int(rng.integers(len(maker.filler)))
    while room >= maker.line_lens[at % len(maker.filler)]:
        lines.append(maker.filler[at % len(maker.filler)])
        room -= maker.line_lens[at % len(maker.filler)]
        at += 1
    filler_len = len(lines)
    for depth, fact in reversed(list(zip(depths, stated, strict=True))):  # from the end, so that no place moves
        lines.insert(round(depth * filler_len), fact.sentence())
    text = Text(maker.ids("<|bos|><|user|>" + "\n".join(lines)), [], stated)
    for depth, fact in zip(depths, stated, strict=True):
        text.questions.append(Question(depth, text.prompt(maker, [fact.name]), facts.answer([fact])))
    assert all(len(question.prompt) <= length for question in text.questions)
    return text
