"""What can be measured without a GPU: host memory, and swap-in as the CPU back end does it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from hisparse.simulator.synthetic import with_hit_rate
from hisparse_kernel import reference

NOT_MEASURED = (
    "the link between GPU and host memory (no GPU: host pool and hot buffer are the same memory)",
    "near and far slots over that link",
    "the CUDA swap-in kernel, and with it the predictions of `hisparse plan` and `hisparse simulate`",
)

PAGE = 64
TOP_K, BUFFER, PROMPT, STEPS = 2048, 4096, 32_768, 6
ROWS = 65_536


def memory_rates(pool_bytes: int, row_bytes: int) -> tuple[float, float]:
    """GB/s of one large copy, and of gathering random rows, in host memory by torch.

    Reading alone is counted, as on the link.
    """
    pool = torch.zeros(pool_bytes // row_bytes, row_bytes, dtype=torch.uint8)
    pool.random_(0, 256)
    copied = torch.empty_like(pool)
    slots = torch.randint(0, len(pool), (ROWS,))
    gathered = torch.empty(ROWS, row_bytes, dtype=torch.uint8)
    copy_s = _median_s(lambda: copied.copy_(pool))
    gather_s = _median_s(lambda: torch.index_select(pool, 0, slots, out=gathered))
    return pool.nbytes / copy_s / 1e9, gathered.nbytes / gather_s / 1e9


def swap_in_ms(row_bytes: int, batches: tuple[int, ...], misses: tuple[int, ...]) -> Iterator[tuple[int, int, float]]:
    """(batch, percent of misses, ms a layer) of the reference, which is what the CPU server runs. Median of a few."""
    for batch in batches:
        for percent in misses:
            yield batch, percent, _reference_ms(row_bytes, batch, percent)


def _reference_ms(row_bytes: int, batch: int, percent: int) -> float:
    made = [
        with_hit_rate(
            top_k=TOP_K, buffer=BUFFER, hit_rate=1 - percent / 100, prompt_len=PROMPT, steps=STEPS, seed=b
        ).at()
        for b in range(batch)
    ]
    selected = torch.from_numpy(np.stack(made, axis=1))
    longest = PROMPT + STEPS
    state = {
        "req_to_token": torch.arange(longest, dtype=torch.int32).repeat(batch + 1, 1),
        "host_rows": torch.zeros(longest, row_bytes, dtype=torch.uint8),
        "hot_rows": torch.zeros((batch + 1) * (BUFFER + PAGE), row_bytes, dtype=torch.uint8),
        "owners": torch.full((batch + 1, BUFFER), -1, dtype=torch.int32),
        "lru_order": torch.arange(BUFFER, dtype=torch.int16).repeat(batch + 1, 1),
        "tail_start": torch.full((batch + 1,), PROMPT, dtype=torch.int32),
        "req_pool_indices": torch.arange(1, batch + 1),
        "num_real_reqs": torch.tensor([batch], dtype=torch.int32),
        "out": torch.empty(batch, TOP_K, dtype=torch.int32),
        "counters": torch.zeros(3, dtype=torch.int64),
    }
    times = []
    for step in range(STEPS):
        seq_lens = torch.full((batch,), PROMPT + step + 1)
        start = time.perf_counter()
        reference.swap_in(selected=selected[step], seq_lens=seq_lens, page_size=PAGE, **state)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3  # the first step finds an empty buffer


def _median_s(work: Callable[[], object], rounds: int = 5) -> float:
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
