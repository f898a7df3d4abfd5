"""Policies of libCacheSim (PyPI `libcachesim`, GPL-3), a program of its own that users install if they like.

It takes one position after another. Here a step's positions go in with those first that are resident, so that a step
hits what was there when it began, as in swap-in; but a later position of the step may push out an earlier one, which
the kernels may not allow. Its figures are thus a little better or worse than such a policy would be here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hisparse.config import HiSparseError
from hisparse.simulator.replay import Step

NAMES = {
    "clock": "Clock",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "2q": "TwoQ",
    "slru": "SLRU",
    "arc": "ARC",
    "lirs": "LIRS",
    "wtinylfu": "WTinyLFU",
    "lecar": "LeCaR",
    "lhd": "LHD",
}
FOR_TESTS = {"library-lru": "LRU", "library-fifo": "FIFO"}
"""Policies that we have ourselves; the tests compare."""

HASH_POWER = 16
"""log2 of the hash table's size. The default, 24, takes 128 MB for each region."""


def library() -> Any:
    """The module. Raises `HiSparseError` if it is not installed."""
    try:
        import libcachesim
    except ImportError:
        raise HiSparseError(
            f"--policy {', '.join(NAMES)} need libCacheSim, which is not installed: pip install "
            "'sglang-hisparse[simulate]'."
        ) from None
    return libcachesim


def replay(steps: Sequence[Step], seeds: np.ndarray, rows: int, name: str) -> np.ndarray:
    """As `hisparse.simulator.replay.replay`, with a policy of `NAMES`."""
    module = library()
    cache = getattr(module, (NAMES | FOR_TESTS)[name])(cache_size=rows, hashpower=HASH_POWER)
    request = module.Request()
    request.obj_size = 1
    for position in seeds[:rows][::-1].tolist():
        request.obj_id = position
        cache.get(request)
    counts = np.zeros((len(steps), 3), np.int64)
    for number, step in enumerate(steps):
        resident: list[int] = []
        missing: list[int] = []
        for position in step.wanted.tolist():
            request.obj_id = position
            (missing if cache.find(request, update_cache=False) is None else resident).append(position)
        for position in (*resident, *missing):
            request.obj_id = position
            cache.get(request)
        counts[number] = step.tail, len(resident) + step.repeated, len(missing)
    return counts
