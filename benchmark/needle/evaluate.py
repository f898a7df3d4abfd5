"""Recall of hidden facts by depth and context length, in plain torch.

    python benchmark/needle/evaluate.py models/needle --lengths 1024,2048,4096 --samples 8

A case is right when every token of the reply, given the ones before it, is the model's first choice; that is what
greedy decoding would write. Names and filler are ones that training never saw.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import corpus
import facts
import numpy as np
import torch
from checkpoint import load
from model import Needle
from tokenizers import Tokenizer
from torch import Tensor

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOKENS_A_FORWARD = 65536


@dataclass(frozen=True)
class Case:
    messages: list[dict[str, str]]  # the prompt, as for a chat completion
    reply: str
    ids: list[int]  # prompt, reply and end token
    reply_len: int  # tokens, the end token included


class Maker:
    """Builds evaluation prompts as text; `ids` are what the chat template and the tokenizer make of it."""

    def __init__(self, folder: Path, filler: list[str] | None = None) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.filler = filler or corpus.split(corpus.lines())[1]
        self.line_lens = [len(e.ids) + 1 for e in self.tokenizer.encode_batch(self.filler)]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def case(self, rng: np.random.Generator, length: int, depth: float, n_facts: int = 8, n_asked: int = 1) -> Case:
        """A prompt of at most `length` tokens (short of it by less than a line) with `n_facts` facts.

        The asked facts stand together at `depth` (0: start of the text, 1: end); the others anywhere.
        """
        stated = [facts.Fact(n, facts.draw_code(rng)) for n in facts.draw_names(rng, n_facts, from_held_out=True)]
        asked, others = stated[:n_asked], stated[n_asked:]
        question = facts.question([fact.name for fact in asked])
        fixed = "\n".join([fact.sentence() for fact in stated] + [question])
        room = length - len(self.ids(f"<|bos|><|user|>{fixed}<|end|><|assistant|>"))
        lines: list[str] = []
        at = int(rng.integers(len(self.filler)))
        while room >= self.line_lens[at % len(self.filler)]:
            lines.append(self.filler[at % len(self.filler)])
            room -= self.line_lens[at % len(self.filler)]
            at += 1
        places = [(round(depth * len(lines)), fact) for fact in asked]
        places += [(int(rng.integers(len(lines) + 1)), fact) for fact in others]
        for place, fact in sorted(places, key=lambda item: -item[0]):
            lines.insert(place, fact.sentence())
        text = "\n".join([*lines, question])
        reply = facts.answer(asked)
        reply_len = len(self.ids(reply + "<|end|>"))
        ids = self.ids(f"<|bos|><|user|>{text}<|end|><|assistant|>{reply}<|end|>")
        return Case([{"role": "user", "content": text}], reply, ids, reply_len)


def predicted_replies(logits: Tensor, cases: list[Case]) -> list[list[int]]:
    """First choices at the reply's positions; logits [cases, T, vocab], of right-padded sequences."""
    return [
        logits[row, len(case.ids) - case.reply_len - 1 : len(case.ids) - 1].argmax(-1).tolist()
        for row, case in enumerate(cases)
    ]


@torch.no_grad()
def right(model: Needle, cases: list[Case], top_k: int | None, *, fp8: bool) -> list[bool]:
    """Which cases the model answers in full. Sequences are padded at the end, where causality hides it."""
    longest = -(-max(len(case.ids) for case in cases) // 64) * 64
    device = next(model.parameters()).device
    out: list[bool] = []
    step = max(1, TOKENS_A_FORWARD // longest)
    for start in range(0, len(cases), step):
        part = cases[start : start + step]
        ids = torch.tensor([case.ids + [0] * (longest - len(case.ids)) for case in part], device=device)
        hidden, _ = model(ids, top_k, fp8=fp8)
        replies = predicted_replies(model.lm_head(hidden), part)
        out += [reply == case.ids[-case.reply_len :] for reply, case in zip(replies, part, strict=True)]
    return out


def table(cells: dict[tuple[str, int, float], float]) -> str:
    """Markdown: a row for each mode and length, a column for each depth, recall in per cent."""
    depths = sorted({depth for _, _, depth in cells})
    rows = ["| attention | tokens | " + " | ".join(f"depth {d:g}" for d in depths) + " | all |"]
    rows.append("|" + "---|" * (len(depths) + 3))
    for mode, length in dict.fromkeys((mode, length) for mode, length, _ in cells):
        values = [100 * cells[mode, length, depth] for depth in depths]
        shown = " | ".join(f"{value:.1f}" for value in [*values, float(np.mean(values))])
        rows.append(f"| {mode} | {length} | {shown} |")
    return "\n".join(rows)


def modes(names: str) -> dict[str, tuple[int | None, bool]]:
    """'dense,256,256-bf16' -> top-k and whether the indexer rounds to fp8, by name"""
    out: dict[str, tuple[int | None, bool]] = {}
    for name in names.split(","):
        top_k = None if name == "dense" else int(name.removesuffix("-bf16"))
        out[name] = (top_k, not name.endswith("-bf16"))
    return out


def evaluate(
    model: Needle,
    maker: Maker,
    lengths: tuple[int, ...],
    samples: int,
    mode_names: str,
    n_asked: int = 1,
    seed: int = 1,
) -> dict[tuple[str, int, float], float]:
    """Recall by (mode, length, depth)."""
    cells: dict[tuple[str, int, float], float] = {}
    for length in lengths:
        rng = np.random.default_rng([seed, length, n_asked])
        by_depth = {d: [maker.case(rng, length, d, n_asked=n_asked) for _ in range(samples)] for d in DEPTHS}
        cases = [case for group in by_depth.values() for case in group]
        for name, (top_k, fp8) in modes(mode_names).items():
            results = np.array(right(model, cases, top_k, fp8=fp8)).reshape(len(DEPTHS), samples)
            cells |= {(name, length, depth): float(row.mean()) for depth, row in zip(DEPTHS, results, strict=True)}
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--samples", type=int, default=8, help="prompts for each length and depth")
    parser.add_argument("--modes", default="dense,256", help="dense, or a top-k; '-bf16' after it: indexer without fp8")
    parser.add_argument("--asked", type=int, default=1, help="facts asked for in one prompt")
    parser.add_argument("--filler", type=Path, help="text file to use for filler, a line each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", type=Path, help="also write the cells here")
    args = parser.parse_args()
    model = load(args.model, getattr(torch, args.dtype)).to(args.device)
    maker = Maker(args.model, args.filler.read_text().splitlines() if args.filler else None)
    start = time.perf_counter()
    cells = evaluate(model, maker, tuple(map(int, args.lengths.split(","))), args.samples, args.modes, args.asked)
    print(table(cells))
    print(f"{args.samples} prompts a cell, {args.asked} asked in each, {time.perf_counter() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([[*key, value] for key, value in cells.items()]) + "\n")


if __name__ == "__main__":
    main()
