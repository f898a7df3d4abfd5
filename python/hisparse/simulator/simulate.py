"""A trace under several policies and buffer sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hisparse.config import MAX_DEVICE_BUFFER_SIZE, HiSparseError
from hisparse.link import swap_in_s
from hisparse.simulator import library
from hisparse.simulator.policies import OWN, WITH_PARAMETER, make_policy
from hisparse.simulator.replay import MISS, Selections, Step, replay, steps_of
from hisparse.trace_format import Trace


@dataclass(frozen=True)
class Region:
    """One request's selections in one layer. rows: where they stand in the trace. seeded: whether the trace says what
    the prefill left; if not, the first step finds nothing and is not counted."""

    request: int
    layer: int
    rows: np.ndarray
    steps: list[Step]
    seeds: np.ndarray
    positions: int

    @property
    def seeded(self) -> bool:
        return len(self.seeds) > 0


@dataclass(frozen=True)
class Outcome:
    """What one policy did with one buffer size.

    Attributes:
        counts: int64 [rows of the trace, 3], columns TAIL, HIT, MISS; rows not counted hold zeros.
        counted: bool [rows of the trace].
    """

    trace: Trace
    policy: str
    buffer: int
    counts: np.ndarray
    counted: np.ndarray

    @property
    def hit_rate(self) -> float:
        """As the server counts: found in LRU rows or tail ring, of all that got a row."""
        total = self.counts.sum()
        return float(1 - self.counts[:, MISS].sum() / total) if total else 1.0

    @property
    def misses(self) -> int:
        return int(self.counts[:, MISS].sum())

    @property
    def misses_a_selection(self) -> float:
        """Rows copied a step, layer and request."""
        return self.misses / max(1, int(self.counted.sum()))

    def bytes_a_step(self, row_bytes: int) -> float:
        """Of all recorded layers and requests together."""
        return self.misses * row_bytes / max(1, len(np.unique(self.trace.step[self.counted])))

    def seconds_a_step(self, row_bytes: int, rate: float) -> float:
        """Predicted swap-in time of a decode step: one launch a layer, for all recorded requests together."""
        trace, counted = self.trace, self.counted
        launch = trace.step[counted] * (int(trace.layer.max(initial=0)) + 1) + trace.layer[counted]
        _, which = np.unique(launch, return_inverse=True)
        missing_bytes = np.bincount(which, weights=self.counts[counted, MISS]) * row_bytes
        return float(swap_in_s(missing_bytes, rate).sum()) / max(1, len(np.unique(trace.step[counted])))


def regions_of(trace: Trace) -> list[Region]:
    """The trace's regions, prepared once for all policies."""
    regions = []
    for request, layer, rows in trace.sequences():
        seq_lens = trace.seq_len[rows]
        seeds = trace.seed_of(request, layer).astype(np.int64)
        selections = Selections(trace.selected[rows].astype(np.int64), seq_lens, int(seq_lens[0]) - 1, seeds)
        positions = max(int(seq_lens[-1]), int(seeds.max(initial=0))) + 1
        regions.append(Region(request, layer, rows, steps_of(selections, trace.page_size), seeds, positions))
    return regions


def simulate(
    trace: Trace, regions: Sequence[Region], *, buffer: int, policy: str, done: Callable[[], object] = lambda: None
) -> Outcome:
    """Replay all regions with buffers of `buffer` LRU rows. `done` is called after each region."""
    counts = np.zeros((len(trace.step), 3), np.int64)
    counted = np.zeros(len(trace.step), bool)
    for region in regions:
        if policy in library.NAMES:
            here = library.replay(region.steps, region.seeds, buffer, policy)
        else:
            here = replay(region.steps, region.seeds, buffer, region.positions, make_policy(policy))
        rows = region.rows if region.seeded else region.rows[1:]
        counts[rows] = here if region.seeded else here[1:]
        counted[rows] = True
        done()
    return Outcome(trace, policy, buffer, counts, counted)


def parse_policies(text: str) -> list[str]:
    """Comma-separated names. Raises `HiSparseError` for one that does not exist or needs what is not installed."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name in library.NAMES:
            library.library()
        elif name.partition(":")[0] in OWN:
            make_policy(name)
        else:
            known = ", ".join(f"{own}[:NUMBER]" if own in WITH_PARAMETER else own for own in OWN)
            raise HiSparseError(f"--policy {name} must be one of {known}, {', '.join(library.NAMES)}.")
    if not names:
        raise HiSparseError("--policy must name at least one policy.")
    return list(dict.fromkeys(names))


def parse_buffers(text: str, top_k: int) -> list[int]:
    """Comma-separated sizes, `2x` for twice top-k, or a number of rows. Raises `HiSparseError`."""
    buffers = []
    for word in (part.strip() for part in text.split(",") if part.strip()):
        try:
            rows = round(float(word[:-1]) * top_k) if word.endswith("x") else int(word)
        except (ValueError, OverflowError):
            raise HiSparseError(
                f"--buffer {word} must be a number of rows, or a multiple of top-k such as 2x."
            ) from None
        if not top_k <= rows <= MAX_DEVICE_BUFFER_SIZE:
            raise HiSparseError(
                f"--buffer {word} is {rows} rows; it must be from the trace's top-k, {top_k}, to "
                f"{MAX_DEVICE_BUFFER_SIZE}."
            )
        buffers.append(rows)
    if not buffers:
        raise HiSparseError("--buffer must name at least one size.")
    return list(dict.fromkeys(buffers))


def gap_closed(outcome: Outcome, others: Iterable[Outcome]) -> float | None:
    """Of the misses that LRU has over the optimum with the same buffer, the share that this policy avoids. None if
    either is not among `others`, or there is nothing to avoid."""
    same = {other.policy: other.misses for other in others if other.buffer == outcome.buffer}
    if "lru" not in same or "belady" not in same or same["lru"] == same["belady"]:
        return None
    return (same["lru"] - outcome.misses) / (same["lru"] - same["belady"])
