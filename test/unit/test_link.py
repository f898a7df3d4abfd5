"""The predicted swap-in time against the measured one."""

from __future__ import annotations

import numpy as np
import pytest

from hisparse.link import LINK_RATES, link_rate, swap_in_s

TOP_K = 2048
MISS_RATES = (0, 0.05, 0.2, 1)
MEASURED_US = {
    (656, 1): (7.2, 11.6, 14.8, 38.4),
    (656, 8): (7.3, 21.8, 55.6, 243.4),
    (656, 32): (7.4, 56.6, 200.2, 999),
    (1152, 1): (6.7, 12.4, 18.2, 54.9),
    (1152, 8): (7.4, 28.2, 82.4, 378.1),
    (1152, 32): (7.4, 83.2, 305.2, 1483),
}
"""Row bytes and batch: our kernel on one H200, 2026-11-30, near slots, buffer 4,096 (docs/benchmarks.md)."""


@pytest.mark.parametrize(("row_bytes", "batch"), MEASURED_US)
def test_the_prediction_is_near_the_measured_table(row_bytes: int, batch: int) -> None:
    missing = np.array([round(rate * TOP_K) * batch * row_bytes for rate in MISS_RATES])
    predicted_us = swap_in_s(missing, link_rate(row_bytes).near) * 1e6
    assert predicted_us == pytest.approx(np.array(MEASURED_US[row_bytes, batch]), rel=0.15)


def test_rates() -> None:
    assert link_rate(1152) == LINK_RATES[1152]
    assert link_rate(704) == LINK_RATES[656]
    assert link_rate(656, 30).scattered == 30e9
