"""Replacement policies, with the rule that a row used in a step stays through it.

Own code, not libCacheSim's, where the rule matters or a study needs it: libCacheSim takes one position after another.
All are a few lines over `Policy.key`, since the kernels could only afford such. Where both exist they agree on traces
with one position a step (test/simulator).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hisparse.config import HiSparseError
from hisparse.simulator.replay import Policy, Step


class Keyed(Policy):
    """Base of policies with a key for every row."""

    def start(self, rows: int, steps: Sequence[Step], seeds: np.ndarray) -> None:
        self.key: np.ndarray = np.zeros(rows)


class Fifo(Keyed):
    """First loaded, first out."""

    name = "fifo"

    def start(self, rows: int, steps: Sequence[Step], seeds: np.ndarray) -> None:
        super().start(rows, steps, seeds)
        self.key[: len(seeds)] = -1

    def used(self, step: int, hits: np.ndarray, loaded: np.ndarray, wanted: Step, rows: np.ndarray) -> None:
        self.key[loaded] = step


class Random(Keyed):
    """Any row that is not in use: what a policy must beat."""

    name = "random"

    def start(self, rows: int, steps: Sequence[Step], seeds: np.ndarray) -> None:
        super().start(rows, steps, seeds)
        self._random = np.random.default_rng(rows)

    def used(self, step: int, hits: np.ndarray, loaded: np.ndarray, wanted: Step, rows: np.ndarray) -> None:
        self.key = self._random.random(len(self.key))


class Lfu(Keyed):
    """Least often used since it was loaded."""

    name = "lfu"

    def used(self, step: int, hits: np.ndarray, loaded: np.ndarray, wanted: Step, rows: np.ndarray) -> None:
        self.key[hits] += 1
        self.key[loaded] = 1


class Aging(Keyed):
    """Frequency that fades: a use counts 1, and half as much `half_life` steps later (LRFU, Lee et al. 2001).

    The key is log2 of the faded count, made comparable between steps by adding step / half_life.
    """

    def __init__(self, half_life: float = 8) -> None:
        self.name = f"aging:{half_life:g}"
        self.half_life = half_life

    def start(self, rows: int, steps: Sequence[Step], seeds: np.ndarray) -> None:
        super().start(rows, steps, seeds)
        self.key[:] = -1 / self.half_life

    def used(self, step: int, hits: np.ndarray, loaded: np.ndarray, wanted: Step, rows: np.ndarray) -> None:
        now = step / self.half_life
        self.key[hits] = now + np.log2(1 + np.exp2(self.key[hits] - now))
        self.key[loaded] = now


class Once(Keyed):
    """LRU in which a row counts as used `bonus` steps later once it was hit since it was loaded; so rows used only
    once go sooner. With a large bonus they go before all others."""

    def __init__(self, bonus: float = 8) -> None:
        self.name = f"once:{bonus:g}"
        self.bonus = bonus

    def start(self, rows: int, steps: Sequence[Step], seeds: np.ndarray) -> None:
        super().start(rows, steps, seeds)
        self.key[:] = -1

    def used(self, step: int, hits: np.ndarray, loaded: np.ndarray, wanted: Step, rows: np.ndarray) -> None:
        self.key[hits] = step + self.bonus
        self.key[loaded] = step


class Lru2(Keyed):
    """Least recent last use but one (LRU-2, O'Neil et al. 1993), remembered while the position is away.

    The memory costs 4 B a position, layer and request, and a kernel would have to keep it on the device.
    """

    name = "lru2"

    def start(self, rows: int, steps: Sequence[Step], seeds: np.ndarray) -> None:
        super().start(rows, steps, seeds)
        largest = max((int(step.wanted.max(initial=0)) for step in steps), default=0)
        self._last = np.full(max(largest, int(seeds.max(initial=0))) + 1, -np.inf)
        self._last[seeds] = -1
        self.key[:] = -np.inf

    def used(self, step: int, hits: np.ndarray, loaded: np.ndarray, wanted: Step, rows: np.ndarray) -> None:
        self.key[rows] = self._last[wanted.wanted]
        self._last[wanted.wanted] = step


class Belady(Keyed):
    """The clairvoyant optimum: the row whose position is needed again last goes first (Belady 1966).

    With whole steps in place of single references it stays optimal: all rows of a step are needed at the same time,
    and a row that is needed sooner can take the place of one needed later in any schedule without more copies.
    """

    name = "belady"

    def start(self, rows: int, steps: Sequence[Step], seeds: np.ndarray) -> None:
        super().start(rows, steps, seeds)
        largest = max((int(step.wanted.max(initial=0)) for step in steps), default=0)
        next_use = np.full(max(largest, int(seeds.max(initial=0))) + 1, np.inf)
        self._next: list[np.ndarray] = []
        for number in range(len(steps) - 1, -1, -1):
            wanted = steps[number].wanted
            self._next.append(next_use[wanted])
            next_use[wanted] = number
        self._next.reverse()
        self.key[: len(seeds)] = -next_use[seeds]

    def used(self, step: int, hits: np.ndarray, loaded: np.ndarray, wanted: Step, rows: np.ndarray) -> None:
        self.key[rows] = -self._next[step]


OWN: dict[str, Callable[..., Policy]] = {
    "lru": Policy,
    "fifo": Fifo,
    "lfu": Lfu,
    "aging": Aging,
    "once": Once,
    "lru2": Lru2,
    "random": Random,
    "belady": Belady,
}
WITH_PARAMETER = {"aging": "half-life in steps", "once": "bonus in steps"}


def make_policy(text: str) -> Policy:
    """`name` or `name:number` of `OWN`. Raises `HiSparseError`."""
    name, colon, number = text.partition(":")
    if name not in OWN or (colon and name not in WITH_PARAMETER):
        raise HiSparseError(f"--policy {text} is not known.")
    if not colon:
        return OWN[name]()
    try:
        value = float(number)
    except ValueError:
        value = 0
    if not value > 0:
        raise HiSparseError(
            f"--policy {text} must have a positive number behind the colon, its {WITH_PARAMETER[name]}."
        )
    return OWN[name](value)
