"""Selections with a chosen hit rate, for benchmarks whose model selects at random or not at all. numpy only.

The idea: all but a few positions of the prompt stand in a ring in random order, and a step selects a window of it,
which moves on by `new_a_step` positions a step. What stays in the window is a hit, what enters it is a miss, because
the ring is so long that a position has left the buffer long before it comes round again. The newest tokens are
selected too, as every model does; they lie in the tail ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SyntheticSelections:
    """One request's selections in one layer, in a form small enough to keep many of them, on a device too.

    Step i (0-based) selects, for column c < window: `ring[(starts[i] + columns[c]) % len(ring)]`, and in the last
    `recent` columns the newest positions, `prompt_len + i - 0, 1, 2, ...`. `at` computes that.

    Attributes:
        ring: int32 [prompt_len - recent], positions of the prompt, each once, in random order.
        columns: int32 [top_k - recent], a permutation: new positions appear anywhere in a selection.
        starts: int64 [steps], where the window begins; rises by `new_a_step` on average.
        prompt_len: tokens before the first step. At step i the request has prompt_len + i + 1 tokens.
        recent: how many of the newest positions every step selects, the step's own included.
    """

    ring: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    prompt_len: int
    recent: int

    @property
    def steps(self) -> int:
        return len(self.starts)

    def at(self, steps: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Positions, int32 [steps, top_k], in each row distinct and below `prompt_len + step + 1`."""
        numbers = np.arange(self.steps)[steps, None]
        window = self.ring[(self.starts[steps, None] + self.columns) % len(self.ring)]
        newest = self.prompt_len + numbers - np.arange(self.recent)
        return np.concatenate((window, newest.astype(np.int32)), axis=1)


def with_hit_rate(
    *,
    top_k: int,
    buffer: int,
    hit_rate: float,
    prompt_len: int,
    steps: int,
    seed: int | Sequence[int],
    recent: int = 32,
    page_size: int = 64,
) -> SyntheticSelections:
    """Selections of which a hot buffer of `buffer` LRU rows (or fewer, down to `top_k`) finds the share `hit_rate`.

    Hits are counted as the server counts them: found in the LRU rows or in the tail ring, of all selected. The rate
    holds from the second step on; the first finds what the prefill seeded, which may be nothing.

    Args:
        top_k: positions a step. buffer: LRU rows of the largest buffer that is to see this rate.
        hit_rate: from recent / top_k to 1.
        prompt_len: tokens before the first step; at least `shortest_prompt` of the same arguments.
        seed: numbers for numpy's generator, for example (seed, request, layer).
        recent: newest positions in every selection; at most page_size, the length of the tail ring.

    Raises:
        ValueError: an argument outside its range.
    """
    if not 1 <= top_k <= buffer:
        raise ValueError(f"top_k={top_k} must be from 1 to buffer={buffer}")
    if not 0 <= recent <= min(page_size, top_k - 1):
        raise ValueError(f"recent={recent} must be from 0 to {min(page_size, top_k - 1)}")
    if not recent / top_k <= hit_rate <= 1:
        raise ValueError(f"hit_rate={hit_rate} must be from recent / top_k = {recent / top_k:.3f} to 1")
    new_a_step = top_k * (1 - hit_rate)
    shortest = shortest_prompt(top_k=top_k, buffer=buffer, hit_rate=hit_rate, recent=recent)
    if prompt_len < shortest:
        raise ValueError(f"prompt_len={prompt_len} is too short: a buffer of {buffer} needs {shortest} to miss again")
    random = np.random.default_rng(seed)
    return SyntheticSelections(
        ring=random.permutation(prompt_len - recent).astype(np.int32),
        columns=random.permutation(top_k - recent).astype(np.int32),
        starts=np.floor(np.arange(steps) * new_a_step + 1e-6).astype(np.int64),
        prompt_len=prompt_len,
        recent=recent,
    )


def shortest_prompt(*, top_k: int, buffer: int, hit_rate: float, recent: int = 32) -> int:
    """Tokens that a prompt needs so that a position has left `buffer` rows when the ring brings it back.

    Between two visits of a position all others of the ring are selected, except those that come and go in its own two
    steps; the rows they need must be the whole buffer. The prompt's last `recent` tokens may hold rows as well.
    """
    new_a_step = int(np.ceil(top_k * (1 - hit_rate)))
    return buffer + 2 * new_a_step + 2 * recent + 1
