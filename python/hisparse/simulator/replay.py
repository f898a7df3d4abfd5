"""One region of the hot buffer, replayed step by step under any replacement policy.

The rules are swap-in's (docs/architecture.md): the tail ring serves the newest positions; a row used in a step is not
replaced in that step; every position that is missing takes a row. Only the choice of the rows that make room is the
policy's. With `Lru` the state equals the executable reference's after every step (test/simulator).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NONE = -1
TAIL, HIT, MISS = 0, 1, 2
"""Columns of the counts, as the data plane's counters: in the tail ring; resident before the step, or a repetition;
copied from the host."""


class Selections(NamedTuple):
    """What one request selected in one layer.

    selected: int [steps, top_k], -1 = none. seq_lens: int [steps], the newest token included, rising by one a step.
    tail_start: position of the first generated token. seeds: positions before the first step, most wanted first.
    """

    selected: np.ndarray
    seq_lens: np.ndarray
    tail_start: int
    seeds: np.ndarray


class Step(NamedTuple):
    """wanted: distinct positions that need an LRU row, in the order of the selection. tail: entries in the tail ring.
    repeated: entries that repeat a wanted position."""

    wanted: np.ndarray
    tail: int
    repeated: int


def steps_of(sequence: Selections, page_size: int) -> list[Step]:
    """What each step asks of the LRU rows; the same for every policy and buffer."""
    steps = []
    for selected, seq_len in zip(sequence.selected, sequence.seq_lens, strict=True):
        valid = selected[(selected >= 0) & (selected < seq_len)]
        in_tail = (valid >= sequence.tail_start) & (valid >= seq_len - page_size)
        wanted = valid[~in_tail]
        distinct = wanted[np.sort(np.unique(wanted, return_index=True)[1])]
        steps.append(Step(distinct, int(in_tail.sum()), len(wanted) - len(distinct)))
    return steps


class Policy:
    """Chooses the rows that make room. This one is least recently used; others set `key`.

    `key`, float [rows]: the row with the smallest goes first, of equal ones the least recently used. `start` is called
    before the first step, `used` after every step; both may change `key`. Rows that hold nothing always go first.
    """

    name = "lru"

    def start(self, rows: int, steps: Sequence[Step], seeds: np.ndarray) -> None:
        """A region is about to be replayed. Seed i lies in row i, and was loaded at step -1."""
        self.key: np.ndarray | None = None

    def used(self, step: int, hits: np.ndarray, loaded: np.ndarray, wanted: Step, rows: np.ndarray) -> None:
        """Rows hit and loaded in this step; `rows[i]` holds `wanted.wanted[i]`."""

    def victims(self, evictable: np.ndarray, empty: np.ndarray, count: int) -> np.ndarray:
        """`count` rows in the order in which missing positions take them.

        Args:
            evictable: rows not used in this step, least recently used first. empty: bool, which of them hold nothing.
        """
        if self.key is None or count == 0:
            return evictable[:count]
        key = np.where(empty, -np.inf, self.key[evictable])
        return evictable[np.argsort(key, kind="stable")[:count]]


class Region:
    """State of one region: `owners` [rows], the position each row holds, and `order` [rows], least recent first."""

    def __init__(self, rows: int, positions: int) -> None:
        self.owners = np.full(rows, NONE, np.int64)
        self.order = np.arange(rows)
        self._row_of = np.full(positions, NONE, np.int64)

    def seed(self, seeds: np.ndarray) -> np.ndarray:
        """As the kernel's `seed`: the i-th goes to row i, the first becomes the most recent. Returns those kept."""
        kept = seeds[: len(self.owners)]
        rows = np.arange(len(kept))
        self.owners[rows] = kept
        self._row_of[kept] = rows
        self.order = np.concatenate((np.arange(len(kept), len(self.owners)), rows[::-1]))
        return kept

    def take(self, number: int, step: Step, policy: Policy) -> int:
        """Make the step's positions resident. Returns how many were missing."""
        wanted = step.wanted
        rows = self._row_of[wanted]
        missing = wanted[rows < 0]
        is_hit = np.zeros(len(self.owners), bool)
        is_hit[rows[rows >= 0]] = True
        hit_in_order = is_hit[self.order]
        hits, evictable = self.order[hit_in_order], self.order[~hit_in_order]
        victims = policy.victims(evictable, self.owners[evictable] < 0, len(missing))
        gone = self.owners[victims]
        self._row_of[gone[gone >= 0]] = NONE
        self.owners[victims] = missing
        self._row_of[missing] = victims
        is_victim = np.zeros(len(self.owners), bool)
        is_victim[victims] = True
        self.order = np.concatenate((evictable[~is_victim[evictable]], victims, hits))
        policy.used(number, hits, victims, step, self._row_of[wanted])
        return len(missing)


def replay(steps: Sequence[Step], seeds: np.ndarray, rows: int, positions: int, policy: Policy) -> np.ndarray:
    """Counts of each step, int64 [steps, 3], columns TAIL, HIT, MISS.

    Args:
        seeds: int, distinct, most wanted first. rows: LRU rows. positions: more than any position.
    """
    assert all(len(step.wanted) <= rows for step in steps), f"a step needs more than the {rows} rows"
    region = Region(rows, positions)
    policy.start(rows, steps, region.seed(seeds))
    counts = np.zeros((len(steps), 3), np.int64)
    for number, step in enumerate(steps):
        missed = region.take(number, step, policy)
        counts[number] = step.tail, len(step.wanted) - missed + step.repeated, missed
    return counts
