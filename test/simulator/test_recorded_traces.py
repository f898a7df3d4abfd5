"""needle's recordings, made by a server with a buffer of 256, give what servers with three sizes counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparse.simulator.simulate import regions_of, simulate
from hisparse.trace_format import read_trace

TRACES = Path(__file__).parents[2] / "benchmark/needle/traces"

SERVERS_COUNTED = {
    "one_fact": {256: (0.581, 107.4), 512: (0.727, 69.8), 1024: (0.827, 44.3)},
    "four_facts": {256: (0.596, 103.5), 512: (0.730, 69.0), 1024: (0.844, 40.0)},
    "conversation": {256: (0.589, 105.1), 512: (0.727, 69.8), 1024: (0.835, 42.3)},
    "free_text": {256: (0.696, 77.9), 512: (0.827, 44.2), 1024: (0.913, 22.2)},
}
"""Hit rate, and rows copied a step, layer and request, of a server for each size (docs/needle.md, 2026-11-30)."""


@pytest.mark.parametrize("workload", SERVERS_COUNTED)
def test_the_simulator_says_what_the_servers_counted(workload: str) -> None:
    trace = read_trace(TRACES / f"{workload}.npz")
    regions = regions_of(trace)
    assert all(region.seeded for region in regions)
    for buffer, (hit_rate, misses) in SERVERS_COUNTED[workload].items():
        outcome = simulate(trace, regions, buffer=buffer, policy="lru")
        assert outcome.hit_rate == pytest.approx(hit_rate, abs=0.0006)
        assert outcome.misses_a_selection == pytest.approx(misses, abs=0.06)
