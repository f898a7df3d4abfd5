"""Policies against independent oracles: libCacheSim, exhaustive search, and each other at their limits."""

from __future__ import annotations

import importlib.util
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.config import HiSparseError
from hisparse.simulator import library
from hisparse.simulator.policies import OWN, make_policy
from hisparse.simulator.replay import MISS, Step, replay

NO_SEEDS = np.zeros(0, np.int64)

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("libcachesim") is None, reason="libCacheSim has no wheel for this machine"
)


def steps_from(sets: list[list[int]]) -> list[Step]:
    return [Step(np.array(wanted, np.int64), 0, 0) for wanted in sets]


def misses(steps: list[Step], rows: int, policy: str, seeds: np.ndarray = NO_SEEDS) -> int:
    return int(replay(steps, seeds, rows, 1000, make_policy(policy))[:, MISS].sum())


def drifting(seed: int, steps: int = 60, top_k: int = 8, positions: int = 60) -> list[Step]:
    random = np.random.default_rng(seed)
    taste = random.normal(size=positions)
    made = []
    for _ in range(steps):
        taste = 0.8 * taste + 0.6 * random.normal(size=positions)
        made.append(Step(np.argsort(-taste)[:top_k], 0, 0))
    return made


@needs_library
@pytest.mark.parametrize(("ours", "theirs"), (("lru", "library-lru"), ("fifo", "library-fifo")))
@pytest.mark.parametrize("rows", (1, 5, 17))
def test_one_position_a_step_is_what_libcachesim_simulates(ours: str, theirs: str, rows: int) -> None:
    random = np.random.default_rng(rows)
    steps = steps_from([[int(p)] for p in random.zipf(1.3, 2000) % 60])
    expected = library.replay(steps, NO_SEEDS, rows, theirs)
    assert np.array_equal(replay(steps, NO_SEEDS, rows, 60, make_policy(ours)), expected)


@needs_library
@pytest.mark.parametrize("name", library.NAMES)
def test_every_library_policy_runs_and_is_no_better_than_the_optimum(name: str) -> None:
    steps = drifting(3)
    counts = library.replay(steps, np.arange(5), 16, name)
    assert (counts.sum(1) == 8).all()
    # Not exact: libCacheSim may drop a row of the present step. It gains little by that.
    assert counts[:, MISS].sum() >= misses(steps, 16, "belady", np.arange(5)) * 0.95


def fewest_misses(steps: list[Step], rows: int) -> int:
    """By trying every choice of rows to keep."""
    from itertools import combinations

    sets = [frozenset(step.wanted.tolist()) for step in steps]

    @cache
    def best(number: int, resident: frozenset[int]) -> int:
        if number == len(sets):
            return 0
        wanted = sets[number]
        others = sorted(resident - wanted)
        room = min(rows - len(wanted), len(others))
        missing = len(wanted - resident)
        return missing + min(best(number + 1, wanted | frozenset(kept)) for kept in combinations(others, room))

    return best(0, frozenset())


@given(
    sets=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True), min_size=1, max_size=9),
    rows=st.integers(3, 5),
)
@settings(max_examples=150, deadline=None)
def test_belady_is_the_optimum(sets: list[list[int]], rows: int) -> None:
    steps = steps_from(sets)
    assert misses(steps, rows, "belady") == fewest_misses(steps, rows)


@pytest.mark.parametrize("name", [*OWN, "aging:2", "once:3"])
@pytest.mark.parametrize("rows", (8, 12, 24))
def test_no_policy_beats_belady(name: str, rows: int) -> None:
    for seed in range(5):
        steps = drifting(seed)
        assert misses(steps, rows, name) >= misses(steps, rows, "belady")


@pytest.mark.parametrize("limit", ("aging:0.001", "once:1e-9"))
def test_policies_become_lru_at_their_limit(limit: str) -> None:
    for seed in range(5):
        steps = drifting(seed)
        for rows in (8, 13, 30):
            ours = replay(steps, np.arange(6), rows, 60, make_policy(limit))
            assert np.array_equal(ours, replay(steps, np.arange(6), rows, 60, make_policy("lru")))


def test_aging_keeps_faded_counts() -> None:
    policy = make_policy("aging:4")
    steps = drifting(1)
    policy.start(60, steps, NO_SEEDS)
    counts = np.zeros(60)
    for number, step in enumerate(steps):
        counts *= 0.5 ** (1 / 4)
        counts[step.wanted] += 1
        seen = counts > 0
        # As if every position had a row of its own number.
        new = step.wanted[counts[step.wanted] == 1]
        policy.used(number, np.setdiff1d(step.wanted, new), new, step, step.wanted)
        assert policy.key is not None
        assert policy.key[seen] - number / 4 == pytest.approx(np.log2(counts[seen]))


def test_a_row_of_the_step_is_never_replaced() -> None:
    steps = steps_from([[1, 2, 3], [4, 5, 1], [1, 2, 6]])
    for name in OWN:
        counts = replay(steps, NO_SEEDS, 3, 10, make_policy(name))
        assert counts[:, MISS].tolist() == [3, 2, 2], name  # 1 stays through the second step; three rows, no choice


def test_ignoring_rows_used_once_resists_a_scan() -> None:
    loop = [[0, 1, 10 + 2 * i, 11 + 2 * i] if i % 3 else [10 + 2 * i, 11 + 2 * i] for i in range(30)]
    steps = steps_from(loop)
    assert misses(steps, 4, "once:100") < misses(steps, 4, "fifo")


@pytest.mark.parametrize("text", ("aging:x", "once:0", "once:-1", "aging:nan"))
def test_a_parameter_must_be_a_positive_number(text: str) -> None:
    with pytest.raises(HiSparseError, match="must have a positive number behind the colon"):
        make_policy(text)
