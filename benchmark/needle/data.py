"""Training sequences as token arrays, every one a pure function of (seed, step).

    python benchmark/needle/data.py models/needle out/needle-data.npz

writes everything training needs (tokenised filler lines and a pool of tokenised names) into one file, so that the
training machine needs neither the tokenizer nor the text.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TEXT, REPLY, CODE = 0, 1, 2  # what a token is, as a prediction target: filler and prompt, answer wording, answer digits
POOL_SIZE = 200_000
MAX_NAME_LEN = 12
MAX_ASKED = 96
INLINE_SHARE = 0.3  # of the facts stand at the end of a line of text; the others on a line of their own
PIECES = {
    "fact": "The access code of",
    "fact_after_text": " The access code of",
    "one": "What is the access code of",
    "many": "What are the access codes of",
    "is": " is",
    "space": " ",
    "dot": ".",
    "newline": "\n",
    "ask": "?",
    "comma": ",",
    "and": " and",
    **{str(digit): str(digit) for digit in range(10)},
}
SPECIALS = {"bos": "<|bos|>", "end": "<|end|>", "user": "<|user|>", "assistant": "<|assistant|>"}


def prepare(model_dir: Path, out: Path, lines: list[str] | None = None, pool_size: int = POOL_SIZE) -> None:
    """Tokenises `lines` (default: the training part of the corpus) and `pool_size` names of the training part."""
    import corpus
    import facts
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    lines = lines or corpus.split(corpus.lines())[0]
    encoded = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch([line + "\n" for line in lines])]
    names = facts.draw_names(np.random.default_rng(7), pool_size, from_held_out=False)
    name_ids = np.zeros((pool_size, MAX_NAME_LEN), np.uint16)
    name_lens = np.zeros(pool_size, np.uint8)
    for row, encoding in enumerate(tokenizer.encode_batch([" " + name for name in names])):
        name_ids[row, : len(encoding.ids)] = encoding.ids[:MAX_NAME_LEN]
        name_lens[row] = len(encoding.ids)
    keep = name_lens <= MAX_NAME_LEN
    pieces = {f"piece_{key}": np.array(tokenizer.encode(text).ids, np.uint16) for key, text in PIECES.items()}
    specials = {f"piece_{key}": np.array([tokenizer.token_to_id(t)], np.uint16) for key, t in SPECIALS.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        out,
        text=np.concatenate(encoded),
        line_starts=np.cumsum([0] + [len(line) for line in encoded])[:-1],
        name_ids=name_ids[keep],
        name_lens=name_lens[keep],
        vocab_size=tokenizer.get_vocab_size(),
        **pieces,
        **specials,
    )


@dataclass
class Prepared:
    """Contents of the prepared file; token ids as lists where they are joined piecewise."""

    text: np.ndarray  # int64 [tokens]
    line_starts: np.ndarray  # int64 [lines], offsets into text
    name_ids: np.ndarray  # uint16 [names, MAX_NAME_LEN]
    name_lens: np.ndarray  # uint8 [names]
    vocab_size: int
    piece: dict[str, list[int]]

    @classmethod
    def load(cls, path: Path) -> Prepared:
        raw = np.load(path)
        return cls(
            text=raw["text"].astype(np.int64),
            line_starts=raw["line_starts"].astype(np.int64),
            name_ids=raw["name_ids"],
            name_lens=raw["name_lens"],
            vocab_size=int(raw["vocab_size"]),
            piece={key.removeprefix("piece_"): raw[key].tolist() for key in raw.files if key.startswith("piece_")},
        )

    def names(self, rng: np.random.Generator, count: int) -> list[list[int]]:
        rows = rng.choice(len(self.name_lens), count, replace=False)
        return [self.name_ids[row, : self.name_lens[row]].tolist() for row in rows]


class Writer:
    """Collects one sequence: tokens and, in step, what each token is as a target."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.kinds: list[int] = []

    def add(self, ids: list[int], kind: int = TEXT) -> None:
        self.ids += ids
        self.kinds += [kind] * len(ids)


def write_sentence(piece: dict[str, list[int]], out: Writer, name: list[int], code: list[int], *, reply: bool) -> None:
    wording = REPLY if reply else TEXT
    out.add(piece["fact"] + name + piece["is"] + piece["space"], wording)
    out.add(code, CODE if reply else TEXT)
    out.add(piece["dot"], wording)


def write_turn(piece: dict[str, list[int]], out: Writer, asked: list[tuple[list[int], list[int]]]) -> None:
    """The rest of a user turn (the question) and the assistant's answer."""
    if len(asked) == 1:
        out.add(piece["one"] + asked[0][0])
    else:
        out.add(piece["many"])
        for position, (name, _) in enumerate(asked):
            before = [] if position == 0 else piece["and"] if position == len(asked) - 1 else piece["comma"]
            out.add(before + name)
    out.add(piece["ask"] + piece["end"] + piece["assistant"])
    for position, (name, code) in enumerate(asked):
        if position:
            out.add(piece["newline"], REPLY)
        write_sentence(piece, out, name, code, reply=True)
    out.add(piece["end"], REPLY)


def chat_sequence(prepared: Prepared, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """One conversation of exactly `length` tokens: facts hidden in filler, then one or more turns of questions.

    Returns int64 [length] token ids and uint8 [length] kinds (TEXT, REPLY, CODE).
    """
    piece = prepared.piece
    most = int(np.clip(length // 60, 2, MAX_ASKED))
    n_asked = int(np.ceil(most ** rng.uniform(0.5, 1.0)))
    n_facts = n_asked + int(rng.integers(0, n_asked + 1))
    names = prepared.names(rng, n_facts)
    codes = [[piece[str(d)][0] for d in digits] for digits in rng.integers(0, 10, (n_facts, 5))]
    stated: list[np.ndarray] = []
    turns = Writer()
    used, next_fact = 2, 0
    while next_fact < n_facts:
        group = 1 if rng.random() < 0.7 else int(rng.integers(2, 5))
        asked = list(zip(names, codes, strict=True))[next_fact : next_fact + group]
        trial, lines = Writer(), []
        for name, code in asked:
            line = Writer()
            write_sentence(piece, line, name, code, reply=False)
            lines.append(np.array(line.ids + piece["newline"], np.int64))
        if next_fact < n_asked:
            if turns.ids:
                trial.add(piece["user"])
            write_turn(piece, trial, [asked[i] for i in rng.permutation(len(asked))])
        cost = sum(map(len, lines)) + len(trial.ids)
        if used + cost > length:
            break
        used += cost
        next_fact += len(asked)
        stated += lines
        turns.ids += trial.ids
        turns.kinds += trial.kinds
    body = hide(prepared, rng, [stated[i] for i in rng.permutation(len(stated))], length - used)
    ids = np.concatenate([np.array(piece["bos"] + piece["user"], np.int64), *body, np.array(turns.ids, np.int64)])
    kinds = np.zeros(length, np.uint8)
    kinds[length - len(turns.kinds) :] = turns.kinds
    assert len(ids) == length, (len(ids), length)
    return ids, kinds


def hide(prepared: Prepared, rng: np.random.Generator, stated: list[np.ndarray], filler_len: int) -> list[np.ndarray]:
    """`filler_len` tokens of consecutive lines with the stated facts (lines of tokens) put in at random places.

    The total is kept: a fact that moves to the end of a text line loses its line break, and the filler grows by it.
    """
    if filler_len == 0:
        return stated
    own_line, inline = (np.array(prepared.piece[key], np.int64) for key in ("fact", "fact_after_text"))
    ends_line = rng.random(len(stated)) < INLINE_SHARE
    lines = [
        np.concatenate([inline, line[len(own_line) : -1]]) if moved else line
        for line, moved in zip(stated, ends_line, strict=True)
    ]
    filler_len += sum(map(len, stated)) - sum(map(len, lines))
    last = np.searchsorted(prepared.line_starts, len(prepared.text) - filler_len, "right")
    first = int(prepared.line_starts[rng.integers(last)])
    filler = prepared.text[first : first + filler_len].copy()
    filler[-1] = prepared.piece["newline"][0]  # the cut line ends like a whole one
    inside = prepared.line_starts[np.searchsorted(prepared.line_starts, first) + 1 :]
    line_ends = np.append(inside[: np.searchsorted(inside, first + filler_len)] - first, filler_len)
    starts = np.append(0, line_ends)
    before_break = line_ends[rng.integers(len(line_ends), size=len(lines))] - 1
    places = np.where(ends_line, before_break, starts[rng.integers(len(starts), size=len(lines))])
    body, start = [], 0
    for index in np.argsort(places, kind="stable"):
        body += [filler[start : places[index]], lines[index]]
        start = places[index]
    return [*body, filler[start:]]


def repeat_sequence(prepared: Prepared, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens repeated: the plainest exercise in looking up what came after the same tokens before."""
    period = int(rng.integers(length // 8, length // 2 + 1))
    ids = np.resize(rng.integers(6, prepared.vocab_size, period), length)
    kinds = np.full(length, CODE, np.uint8)
    kinds[: period + 2] = TEXT
    return ids, kinds


def batch(
    prepared: Prepared, seed: int, step: int, length: int, tokens: int, repeat_share: float
) -> tuple[np.ndarray, np.ndarray]:
    """The batch of one training step: int64 [tokens / length, length] ids and uint8 kinds of the same shape."""
    rng = np.random.default_rng([seed, step])
    rows = [
        (repeat_sequence if rng.random() < repeat_share else chat_sequence)(prepared, rng, length)
        for _ in range(tokens // length)
    ]
    return np.stack([ids for ids, _ in rows]), np.stack([kinds for _, kinds in rows])


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
