"""Made-up traces, each with one property that replacement policies differ in. numpy only.

None imitates a model; together they show what a policy is good and bad at. A pattern gives every position a score
at every step and selects the top-k, as an indexer does. Prompt positions only, except `recency`, so that what the tail
ring does stays out of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hisparse.trace_format import Trace

Scores = Iterator[np.ndarray]
"""For each step, float [positions so far]; higher is more wanted."""

PAGE_SIZE = 64


def drift(random: np.random.Generator, prompt_len: int, steps: int) -> Scores:
    """Interest in a position fades and returns: half lasting taste, half an AR(1) process of 20 steps."""
    lasting, passing = random.normal(size=(2, prompt_len))
    fade = np.exp(-1 / 20)
    for _ in range(steps):
        passing = fade * passing + np.sqrt(1 - fade**2) * random.normal(size=prompt_len)
        yield lasting + passing


def zipf(random: np.random.Generator, prompt_len: int, steps: int) -> Scores:
    """Lasting popularity, 1 / rank, and no memory: each step draws anew (Gumbel top-k)."""
    popularity = -np.log(1 + random.permutation(prompt_len))
    for _ in range(steps):
        yield popularity + random.gumbel(size=prompt_len)


def recency(random: np.random.Generator, prompt_len: int, steps: int) -> Scores:
    """The nearer to the end the likelier, 1 / distance; new tokens leave the tail ring and are wanted still."""
    for step in range(steps):
        length = prompt_len + step + 1
        yield -np.log(length - np.arange(length)) + random.gumbel(size=length)


def periodic(random: np.random.Generator, prompt_len: int, steps: int) -> Scores:
    """Twelve topics in turn, eight steps each, and a common core: more between two visits than a buffer holds."""
    core, *topics = random.normal(size=(13, prompt_len))
    for step in range(steps):
        yield core + 1.5 * topics[step // 8 % len(topics)] + 0.3 * random.normal(size=prompt_len)


def scan(random: np.random.Generator, prompt_len: int, steps: int) -> Scores:
    """A hot set that a step uses most of, and positions read once, in passing, one after the other."""
    order = random.permutation(prompt_len)
    hot, passed = order[:300], order[300:]
    for step in range(steps):
        scores = random.normal(size=prompt_len) - 10
        scores[hot] = random.normal(size=len(hot))
        scores[passed[(step * 80 + np.arange(80)) % len(passed)]] = 20
        yield scores


def phases(random: np.random.Generator, prompt_len: int, steps: int) -> Scores:
    """As drift, but every 60 steps most of the lasting taste changes at once."""
    core = random.normal(size=prompt_len)
    passing, fade = random.normal(size=prompt_len), np.exp(-1 / 20)
    for step in range(steps):
        if step % 60 == 0:
            topic = random.normal(size=prompt_len)
        passing = fade * passing + np.sqrt(1 - fade**2) * random.normal(size=prompt_len)
        yield 0.5 * core + topic + 0.7 * passing


PATTERNS: dict[str, Callable[[np.random.Generator, int, int], Scores]] = {
    "drift": drift,
    "zipf": zipf,
    "recency": recency,
    "periodic": periodic,
    "scan": scan,
    "phases": phases,
}


def make_trace(pattern: str, *, top_k: int, prompt_len: int, steps: int, requests: int, seed: int) -> Trace:
    """One layer, `requests` requests side by side, each with its own random numbers. Regions are seeded with four
    selections of the steps before the first, as a prefill's last queries would."""
    assert top_k + 64 <= prompt_len, f"top_k={top_k} leaves nothing to choose among {prompt_len} positions"
    selected = np.empty((steps, requests, top_k), np.int32)
    seeded = np.empty((requests, 4 * top_k), np.int32)
    for request in range(requests):
        random = np.random.default_rng((seed, request))
        before = [np.empty(0, np.int32)] * 4
        for step, scores in enumerate(PATTERNS[pattern](random, prompt_len, steps + 4)):
            if step < 4:
                before[3 - step] = _best(scores[:prompt_len], top_k)
            else:
                selected[step - 4, request] = _best(scores[: prompt_len + step - 3], top_k)
        seeded[request] = _distinct(np.concatenate(before))
    row_step, row_request = np.divmod(np.arange(steps * requests), requests)
    return Trace(
        about={"workload": f"made up: {pattern}", "page_size": PAGE_SIZE, "top_k": top_k},
        step=row_step,
        layer=np.zeros(len(row_step), np.int64),
        request=row_request,
        seq_len=prompt_len + 1 + row_step,
        selected=selected.reshape(-1, top_k),
        seed_layer=np.zeros(requests, np.int64),
        seed_request=np.arange(requests),
        seeded=seeded,
    )


def _best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """The top-k in no particular order, as fast selection kernels return them."""
    return np.argpartition(-scores, top_k - 1)[:top_k].astype(np.int32)


def _distinct(positions: np.ndarray) -> np.ndarray:
    """First occurrences in order, filled up with -1."""
    first = np.sort(np.unique(positions, return_index=True)[1])
    return np.concatenate((positions[first], np.full(len(positions) - len(first), -1, positions.dtype)))
