"""Traces: written and read back, recorded ones of needle, and files that are none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.trace_format import Trace, TraceError, read_parts, read_trace, write_trace

RECORDED = Path(__file__).parents[2] / "benchmark" / "needle" / "traces"


def make(rows: int = 12, top_k: int = 5, largest: int = 900, seeds: int = 3, seed: int = 0, **about: Any) -> Trace:
    random = np.random.default_rng(seed)
    return Trace(
        about={"page_size": 64, **about},
        step=np.arange(rows) // 4,
        layer=np.arange(rows) % 2,
        request=np.arange(rows) // 2 % 2,
        seq_len=largest + 1 + np.arange(rows) // 4,
        selected=random.integers(-1, largest + 1, (rows, top_k)).astype(np.int32),
        seed_layer=np.arange(seeds) % 2,
        seed_request=np.arange(seeds) // 2,
        seeded=random.integers(-1, largest + 1, (seeds, 2 * top_k)).astype(np.int32),
    )


def assert_equal(read: Trace, written: Trace) -> None:
    for field in dataclasses.fields(Trace):
        if field.name != "about":
            np.testing.assert_array_equal(getattr(read, field.name), getattr(written, field.name), field.name)


@given(
    rows=st.integers(0, 20),
    top_k=st.integers(1, 9),
    largest=st.sampled_from((0, 254, 255, 65533, 65534, 65535, 10**6)),
    seeds=st.integers(0, 4),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: int, top_k: int, largest: int, seeds: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "a.npz"
    written = make(rows, top_k, largest, seeds, model="m")
    write_trace(path, written)
    read = read_trace(path)
    if seeds:
        assert_equal(read, written)
    else:
        assert_equal(dataclasses.replace(read, seeded=written.seeded), written)
    assert read.selected.dtype == np.int32 and read.step.dtype == np.int64
    assert read.about["model"] == "m" and read.about["top_k"] == top_k == read.top_k
    assert read.page_size == 64
    assert not list(path.parent.glob("*.partial"))


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    parts = [make(seed=0, seeds=2), make(seed=1, seeds=0), make(seed=2, seeds=3, top_k=5)]
    for number, part in enumerate(parts):
        write_trace(tmp_path / f"part-{number:04}.npz", part)
    whole = read_trace(tmp_path)
    np.testing.assert_array_equal(whole.selected, np.concatenate([part.selected for part in parts]))
    np.testing.assert_array_equal(whole.seeded, np.concatenate([part.seeded for part in parts if len(part.seeded)]))
    assert len(list(read_parts(tmp_path))) == 3


def test_a_servers_folder_stands_for_its_only_trace(tmp_path: Path) -> None:
    (tmp_path / "20261130-120000-rank0").mkdir()
    write_trace(tmp_path / "20261130-120000-rank0" / "part-00000.npz", make())
    assert_equal(read_trace(tmp_path), make())
    (tmp_path / "20261130-130000-rank0").mkdir()
    assert_equal(read_trace(tmp_path), make())
    write_trace(tmp_path / "20261130-130000-rank0" / "part-00000.npz", make())
    with pytest.raises(TraceError, match=r"several traces, name one of 20261130-120000-rank0, 20261130-130000-rank0"):
        read_trace(tmp_path)


def test_sequences_are_requests_by_layer() -> None:
    trace = make(rows=16)
    found = list(trace.sequences())
    assert [(request, layer) for request, layer, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for request, layer, rows in found:
        assert (trace.request[rows] == request).all() and (trace.layer[rows] == layer).all()
        assert (np.diff(trace.step[rows]) == 1).all() and len(rows) == 4
    assert list(make(rows=0).sequences()) == []


def test_seeds() -> None:
    trace = make()
    np.testing.assert_array_equal(trace.seed_of(0, 1), trace.seeded[1][trace.seeded[1] >= 0])
    assert trace.seed_of(7, 0).shape == (0,)


@pytest.mark.parametrize("name", ("one_fact", "four_facts", "conversation", "free_text"))
def test_recorded_traces_of_needle(name: str) -> None:
    trace = read_trace(RECORDED / f"{name}.npz")
    assert (trace.top_k, trace.page_size) == (256, 64)
    assert trace.selected.max() < trace.seq_len.max()
    assert (trace.selected < trace.seq_len[:, None]).all() and trace.selected.min() >= -1
    for _, _, rows in trace.sequences():
        assert (np.diff(trace.seq_len[rows]) == 1).all()


def test_what_is_no_trace_is_one_sentence(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.npz", make(rank=0))
    whole = (tmp_path / "a.npz").read_bytes()
    broken = tmp_path / "broken.npz"
    for content in (b"", b"text", whole[: len(whole) // 2]):
        broken.write_bytes(content)
        with pytest.raises(TraceError, match=r"broken.npz is no trace that can be read"):
            read_trace(broken)
    np.savez(broken, step=np.zeros(3))
    with pytest.raises(TraceError, match=r"is no trace"):
        read_trace(broken)
    broken.unlink()
    with pytest.raises(TraceError, match=r"neither a trace"):
        read_trace(tmp_path / "gone.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"neither a trace"):
        read_trace(tmp_path / "empty")
    write_trace(tmp_path / "b.npz", make(rank=1))
    with pytest.raises(TraceError, match=r"parts of different traces: rank is 0 and 1"):
        read_trace(tmp_path)
    write_trace(tmp_path / "b.npz", make(format=99))
    with pytest.raises(TraceError, match=r"trace format 99"):
        read_trace(tmp_path / "b.npz")
