"""The simulator's LRU against the executable reference: the same state and counts after every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.simulator.replay import Policy, Region, Selections, replay, steps_of
from hisparse_kernel import reference

REGION = 2


class Reference:
    """One region of the executable reference; rows are 16 B that nobody looks at."""

    def __init__(self, rows: int, page: int, longest: int, tail_start: int, seeds: np.ndarray) -> None:
        self.page = page
        self.req_to_token = torch.arange(longest, dtype=torch.int32).repeat(REGION + 1, 1)
        self.host_rows = torch.zeros(longest, 16, dtype=torch.uint8)
        self.hot_rows = torch.zeros((REGION + 1) * (rows + page), 16, dtype=torch.uint8)
        self.owners = torch.empty(1, REGION + 1, rows, dtype=torch.int32)
        self.lru_order = torch.empty(1, REGION + 1, rows, dtype=torch.int16)
        self.tail_start = torch.zeros(REGION + 1, dtype=torch.int32)
        reference.reset(
            owners=self.owners,
            lru_order=self.lru_order,
            tail_start=self.tail_start,
            regions=torch.tensor([REGION]),
            seq_lens=torch.tensor([tail_start]),
        )
        self.owners, self.lru_order = self.owners[0], self.lru_order[0]
        if len(seeds):
            reference.seed(
                candidates=torch.from_numpy(seeds.astype(np.int32))[None],
                regions=torch.tensor([REGION]),
                workspace_starts=torch.tensor([0]),
                workspace=self.host_rows,
                hot_rows=self.hot_rows,
                owners=self.owners,
                lru_order=self.lru_order,
                page_size=page,
            )

    def step(self, selected: np.ndarray, seq_len: int) -> list[int]:
        counters = torch.zeros(3, dtype=torch.int64)
        reference.swap_in(
            selected=torch.from_numpy(selected.astype(np.int32))[None],
            seq_lens=torch.tensor([seq_len]),
            req_pool_indices=torch.tensor([REGION]),
            num_real_reqs=torch.tensor([1], dtype=torch.int32),
            req_to_token=self.req_to_token,
            host_rows=self.host_rows,
            hot_rows=self.hot_rows,
            owners=self.owners,
            lru_order=self.lru_order,
            tail_start=self.tail_start,
            page_size=self.page,
            out=torch.empty(1, len(selected), dtype=torch.int32),
            counters=counters,
        )
        return counters.tolist()


def make_selections(random: np.random.Generator, *, steps: int, top_k: int, prompt_len: int, messy: bool) -> Selections:
    """Selections that drift; messy ones also hold -1, repetitions and positions beyond the end."""
    seq_lens = prompt_len + 1 + np.arange(steps)
    selected = np.empty((steps, top_k), np.int64)
    for step, seq_len in enumerate(seq_lens):
        near = (step * 2 + random.geometric(0.1, top_k)) % prompt_len
        recent = seq_len - 1 - random.integers(0, 20, top_k)
        pick = np.where(random.random(top_k) < 0.3, np.maximum(recent, 0), near)
        if not messy:
            pick = random.permutation(np.unique(np.concatenate((pick, np.arange(top_k)))))[:top_k]
        else:
            pick = np.where(random.random(top_k) < 0.1, random.integers(-1, seq_len + 5, top_k), pick)
        selected[step] = pick
    seeds = random.permutation(prompt_len)[: random.integers(0, prompt_len)]
    return Selections(selected, seq_lens, prompt_len, seeds)


@given(
    seed=st.integers(0, 2**32),
    top_k=st.integers(1, 12),
    spare=st.integers(0, 20),
    page=st.sampled_from((1, 4, 16)),
    messy=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_state_and_counts_are_equal_after_every_step(seed: int, top_k: int, spare: int, page: int, messy: bool) -> None:
    random = np.random.default_rng(seed)
    rows = top_k + spare
    made = make_selections(random, steps=25, top_k=top_k, prompt_len=60, messy=messy)
    theirs = Reference(rows, page, longest=100, tail_start=made.tail_start, seeds=made.seeds)
    ours = Region(rows, positions=100)
    ours.seed(made.seeds)
    policy = Policy()
    policy.start(rows, [], made.seeds)
    steps = steps_of(made, page)
    replayed = replay(steps, made.seeds, rows, 100, Policy())
    for number, step in enumerate(steps):
        counts = theirs.step(made.selected[number], int(made.seq_lens[number]))
        missed = ours.take(number, step, policy)
        assert [step.tail, len(step.wanted) - missed + step.repeated, missed] == counts == replayed[number].tolist()
        assert np.array_equal(ours.owners, theirs.owners[REGION].numpy())
        assert np.array_equal(ours.order, theirs.lru_order[REGION].numpy())


@pytest.mark.parametrize("buffer", (256, 512, 1024))
def test_counts_are_equal_on_a_recorded_trace(buffer: int) -> None:
    from pathlib import Path

    from hisparse.trace_format import read_trace

    trace = read_trace(Path(__file__).parents[2] / "benchmark/needle/traces/four_facts.npz")
    for _, _, rows in list(trace.sequences())[::5]:
        seq_lens = trace.seq_len[rows]
        made = Selections(trace.selected[rows], seq_lens, int(seq_lens[0]) - 1, np.zeros(0, np.int64))
        longest = int(seq_lens[-1]) + 1
        theirs = Reference(buffer, 64, longest, made.tail_start, made.seeds)
        expected = [theirs.step(sel, int(n)) for sel, n in zip(made.selected, seq_lens, strict=True)]
        assert replay(steps_of(made, 64), made.seeds, buffer, longest, Policy()).tolist() == expected
