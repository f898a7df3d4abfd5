"""What the link between GPU and host memory was measured to carry; for estimates, nothing in the server reads it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class LinkRate(NamedTuple):
    """Rows that swap-in's gather reads from pinned host memory, bytes a second.

    near: each request's slots lie together. scattered: its pages lie anywhere in a pool of 30 GB.
    """

    near: float
    scattered: float


LINK_RATES = {1152: LinkRate(49e9, 43e9), 656: LinkRate(43e9, 28e9)}
"""By row bytes, measured on one H200 (PCIe 5 x16, one GPU at a time), 2026-11-30. Other GPUs with such a link are
assumed to be alike; that all GPUs of a host reach this at the same time is an assumption too."""

RESOLVE_S = 7e-6
"""Swap-in of one layer with nothing to copy, on the same machine."""

FIRST_ROWS_S = 4e-6
"""The least that copying takes once a single row is missing."""


def link_rate(row_bytes: int, gb_per_s: float | None = None) -> LinkRate:
    """The measured rate for this row, or the user's; rows never measured take the rate of the nearest size."""
    if gb_per_s is not None:
        return LinkRate(gb_per_s * 1e9, gb_per_s * 1e9)
    nearest = min(LINK_RATES, key=lambda measured: abs(measured - row_bytes))
    return LINK_RATES[nearest]


def swap_in_s(missing_bytes: np.ndarray, rate: float) -> np.ndarray:
    """Predicted seconds of one layer's swap-in, by the bytes that its whole batch misses.

    Within 15 % of the table in docs/benchmarks.md up to batch 32 with near slots (test/unit/test_link.py).
    """
    copying = np.maximum(missing_bytes / rate, FIRST_ROWS_S)
    return RESOLVE_S + np.where(missing_bytes > 0, copying, 0.0)
