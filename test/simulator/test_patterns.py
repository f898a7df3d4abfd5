"""Made-up traces are legal, reproducible, and have the property they are named for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hisparse.simulator.patterns import PATTERNS, make_trace
from hisparse.simulator.simulate import regions_of, simulate
from hisparse.trace_format import Trace, read_trace, write_trace


def small(pattern: str, seed: int = 1) -> Trace:
    return make_trace(pattern, top_k=64, prompt_len=2000, steps=40, requests=2, seed=seed)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_selections_are_distinct_and_exist(pattern: str, tmp_path: Path) -> None:
    trace = small(pattern)
    assert (trace.selected >= 0).all() and (trace.selected < trace.seq_len[:, None]).all()
    assert (np.diff(np.sort(trace.selected, axis=1), axis=1) > 0).all()
    assert len({request for request, _, _ in trace.sequences()}) == 2
    for request in (0, 1):
        seeds = trace.seed_of(request, 0)
        assert 64 <= len(seeds) == len(set(seeds.tolist())) and seeds.max() < 2000
    write_trace(tmp_path / "t.npz", trace)
    assert np.array_equal(read_trace(tmp_path / "t.npz").selected, trace.selected)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_seed_decides(pattern: str) -> None:
    assert np.array_equal(small(pattern).selected, small(pattern).selected)
    assert not np.array_equal(small(pattern).selected, small(pattern, seed=2).selected)


def misses(pattern: str, policy: str, buffer: int) -> int:
    trace = make_trace(pattern, top_k=256, prompt_len=8192, steps=120, requests=1, seed=5)
    return simulate(trace, regions_of(trace), buffer=buffer, policy=policy).misses


def test_each_pattern_has_its_property() -> None:
    assert misses("zipf", "lfu", 512) < misses("zipf", "lru", 512), "popularity rewards frequency"
    assert misses("scan", "once:1000", 512) < misses("scan", "lru", 512), "a scan punishes keeping what was used once"
    assert misses("drift", "lru", 512) < misses("drift", "random", 512), "drift rewards recency"
