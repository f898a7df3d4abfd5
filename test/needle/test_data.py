"""Training sequences: exact length, what the tokenizer makes of their text, held-out names absent, reproducible."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "needle"
sys.path.insert(0, str(ROOT / "benchmark" / "needle"))

import data  # noqa: E402
import facts  # noqa: E402

tokenizers = pytest.importorskip("tokenizers")
FACT = re.compile(r"The access code of (\w+) is (\d{5})\.")
LINES = [f"This is line number {i} of a text about nothing, (with) some: punctuation!" for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path = tmp_path_factory.mktemp("needle") / "data.npz"
    data.prepare(MODEL, path, LINES, pool_size=3000)
    return data.Prepared.load(path)


def text(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize("length", [256, 512, 2048])
def test_tokens_are_what_the_tokenizer_makes_of_the_text(prepared, tokenizer, length):
    for step in range(20):
        ids, kinds = data.batch(prepared, 0, step, length, length, repeat_share=0.0)
        assert ids.shape == kinds.shape == (1, length)
        assert tokenizer.encode(text(tokenizer, ids[0])).ids == ids[0].tolist()


@pytest.mark.parametrize("length", [256, 2048])
def test_every_answer_is_stated_in_the_text_and_its_digits_are_marked(prepared, tokenizer, length):
    for step in range(20):
        ids, kinds = (array[0] for array in data.batch(prepared, 1, step, length, length, repeat_share=0.0))
        prompt, *replies = text(tokenizer, ids).split("<|assistant|>")
        stated = dict(FACT.findall(prompt))
        answered = [pair for reply in replies for pair in FACT.findall(reply.split("<|end|>")[0])]
        assert answered
        assert all(stated[name] == code for name, code in answered)
        assert text(tokenizer, ids[kinds == data.CODE]) == "".join(code for _, code in answered)


def test_names_of_the_evaluation_are_not_trained_on(prepared, tokenizer):
    for step in range(20):
        ids, _ = data.batch(prepared, 2, step, 1024, 1024, repeat_share=0.0)
        assert not any(facts.held_out(name) for name, _ in FACT.findall(text(tokenizer, ids[0])))
    assert all(map(facts.held_out, facts.draw_names(np.random.default_rng(0), 50, from_held_out=True)))


def test_a_batch_depends_on_seed_and_step_only(prepared):
    first, again, other = (data.batch(prepared, 3, step, 512, 2048, repeat_share=0.5)[0] for step in (7, 7, 8))
    assert (first == again).all()
    assert (first != other).any()


def test_repeats_repeat(prepared):
    ids, kinds = data.repeat_sequence(prepared, np.random.default_rng(0), 256)
    period = int(np.flatnonzero(kinds == data.CODE)[0]) - 2
    assert (ids[period:] == ids[:-period]).all()


@pytest.mark.parametrize("digits", ["48213", "00000"])
def test_a_code_is_five_tokens(tokenizer, digits):
    assert len(tokenizer.encode(digits).ids) == 5
