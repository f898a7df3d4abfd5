"""Our training model and transformers' DeepseekV32ForCausalLM, on the shipped checkpoint, give the same logits.

Two tolerances, for two reasons (logits reach 70; seen on one machine: 0.00014 dense, 0.0004 sparse).

Dense (a prompt no longer than index_topk, so that every position is selected): both sides run the same formulas
in float32 and differ by the order of sums only: DENSE_TOLERANCE.

Sparse: transformers scores the indexer without rounding to fp8. With our fp8 switched off too, both select by the same
float32 scores, and only near-ties at rank index_topk may fall differently, which moves the logits of few positions
by more than rounding: all but one position in a hundred keep within SPARSE_TOLERANCE, those of the reply always.
With fp8 on, as served, a few per cent of the selection differs and logits move by 0.1 to 1; no answer may change,
so there the test compares the tokens of the replies, and holds both against the truth.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "needle"
sys.path.insert(0, str(ROOT / "benchmark" / "needle"))

from checkpoint import load  # noqa: E402
from evaluate import Maker, predicted_replies  # noqa: E402

DENSE_TOLERANCE = 1e-3
SPARSE_TOLERANCE = 2e-3
SPARSE_LEN = 1024


@pytest.fixture(scope="module")
def ours():
    return load(MODEL)


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    model = transformers.DeepseekV32ForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.fixture(scope="module")
def maker():
    return Maker(MODEL, [f"Line {i} of the filler says nothing about any access code." for i in range(300)])


@torch.no_grad()
def test_no_weight_is_missing_or_left_over(ours, theirs):
    assert set(ours.state_dict()) == set(theirs.state_dict())


@torch.no_grad()
def test_dense_logits_agree(ours, theirs, maker):
    ids = torch.tensor([maker.case(np.random.default_rng(0), 230, depth=0.5, n_facts=2).ids])
    assert ids.shape[1] <= ours.config.index_topk
    expected = theirs(ids).logits
    hidden, _ = ours(ids)
    torch.testing.assert_close(ours.lm_head(hidden), expected, atol=DENSE_TOLERANCE, rtol=0)


@torch.no_grad()
def test_sparse_logits_agree_without_fp8(ours, theirs, maker):
    case = maker.case(np.random.default_rng(1), SPARSE_LEN, depth=0.3, n_facts=4)
    ids = torch.tensor([case.ids])
    hidden, _ = ours(ids, ours.config.index_topk, fp8=False)
    difference = (ours.lm_head(hidden) - theirs(ids).logits)[0].abs().amax(-1)
    assert (difference > SPARSE_TOLERANCE).float().mean() <= 0.01
    assert difference[-case.reply_len - 1 :].max() <= SPARSE_TOLERANCE


@torch.no_grad()
def test_fp8_selection_answers_as_transformers_does(ours, theirs, maker):
    cases = [maker.case(np.random.default_rng(seed), SPARSE_LEN, depth=0.1 * seed, n_facts=4) for seed in range(4)]
    for case in cases:
        ids = torch.tensor([case.ids])
        hidden, _ = ours(ids, ours.config.index_topk, fp8=True)
        replies = predicted_replies(ours.lm_head(hidden), [case]), predicted_replies(theirs(ids).logits, [case])
        assert replies[0] == replies[1] == [case.ids[-case.reply_len :]]
