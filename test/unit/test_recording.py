"""Recording without a server: sampling, numbering of requests, seeds, parts, limits, and what happens on errors."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_scheduler import BUFFER, LAYERS, PAGE_SIZE, REGIONS, TOP_K, FakeScheduler, anywhere

import hisparse.trace_writer
from hisparse.recorder import Record, SelectionRecorder
from hisparse.trace_format import Trace, read_parts, read_trace
from hisparse.trace_writer import TraceWriter

ABOUT = {"page_size": PAGE_SIZE, "layers": [3, 5]}


def eventually(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def decode_record(rids: list[str], lens: list[int], first: int = 0) -> Record:
    positions = torch.arange(first, first + 2 * len(rids) * 4, dtype=torch.int32).reshape(2, len(rids), 4)
    return Record(rids, torch.tensor(lens), positions, None)


def seed_record(rids: list[str], candidates: list[int]) -> Record:
    return Record(rids, None, torch.tensor(candidates, dtype=torch.int32).expand(2, len(rids), -1), None)


# ---- the writer


def test_requests_are_numbered_by_their_first_step(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "a" / "b", ABOUT, 2**20)
    writer.put(seed_record(["x", "y"], [7, -1, 5, 7, 5, 2]))
    writer.put(decode_record(["y"], [4]))
    writer.put(decode_record(["y", "x"], [5, 9]))
    writer.put(seed_record(["y"], [1, 1, 1, -1, -1, -1]))  # retracted, and prefilled again
    writer.put(decode_record(["y", "x"], [3, 10], first=100))
    writer.close()
    trace = read_trace(tmp_path / "a" / "b")
    assert trace.request.tolist() == [0, 0, 0, 1, 0, 1, 2, 1, 2, 1]
    assert trace.layer.tolist() == [3, 5, 3, 3, 5, 5, 3, 3, 5, 5]
    assert trace.step.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert trace.seq_len.tolist() == [4, 4, 5, 9, 5, 9, 3, 10, 3, 10]
    assert trace.selected[-4:].tolist() == [[100 + 4 * row + i for i in range(4)] for row in range(4)]
    for request, seed in ((0, [7, 5, 2]), (1, [7, 5, 2]), (2, [1])):
        assert trace.seed_of(request, 3).tolist() == trace.seed_of(request, 5).tolist() == seed
    assert (trace.about["part"], trace.about["layers"]) == (0, [3, 5])


def test_a_quiet_writer_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hisparse.trace_writer, "QUIET_S", 0.05)
    writer = TraceWriter(tmp_path, ABOUT, 2**20)
    writer.put(decode_record(["x"], [4]))
    eventually(lambda: (tmp_path / "part-00000.npz").exists())
    writer.put(decode_record(["x"], [5]))
    eventually(lambda: (tmp_path / "part-00001.npz").exists())
    writer.close()
    first, second = read_parts(tmp_path)
    assert first.step.tolist() == [0, 0] and second.step.tolist() == [1, 1]
    assert second.request.tolist() == [0, 0]


def test_the_trace_ends_at_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hisparse.trace_writer, "PART_BYTES", 1)
    writer = TraceWriter(tmp_path, ABOUT, max_bytes=3000)
    length = 4
    while writer.open and length < 1000:
        writer.put(decode_record(["x"], [length]))
        length += 1
    writer.close()
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.npz"))]
    assert 0 < sum(sizes[:-1]) < 3000 <= sum(sizes)
    writer.put(decode_record(["x"], [length]))  # returns


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, trace: Trace, level: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hisparse.trace_writer, "write_trace", full)
    monkeypatch.setattr(hisparse.trace_writer, "PART_BYTES", 1)
    writer = TraceWriter(tmp_path, ABOUT, 2**20)
    for length in range(3 * hisparse.trace_writer.MAX_WAITING):
        writer.put(decode_record(["x"], [length]))
    eventually(lambda: not writer.open)
    assert "ends here" in caplog.text and "No space left" in caplog.text


def test_memory_of_requests_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hisparse.trace_writer, "MAX_REQUESTS", 3)
    monkeypatch.setattr(hisparse.trace_writer, "MAX_SEEDS", 2)
    writer = TraceWriter(tmp_path, ABOUT, 2**20)
    for i in range(6):
        writer.put(seed_record([f"never decodes {i}"], [1]))
        writer.put(decode_record([str(i)], [4]))
    writer.close()
    assert len(writer._numbers) == 3 and len(writer._seeds) == 2
    assert sorted(set(read_trace(tmp_path).request.tolist())) == list(range(6))


def test_selections_are_kept_ascending_with_none_last(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, ABOUT, 2**20)
    writer.put(Record(["x"], torch.tensor([9]), torch.tensor([[[5, -1, 8, 2]], [[-1, 7, 7, 0]]]).int(), None))
    writer.close()
    trace = read_trace(tmp_path)
    assert trace.selected.tolist() == [[2, 5, 8, -1], [0, 7, 7, -1]]
    assert trace.about["order"] == "ascending"


# ---- the recorder


class Kept:
    """In place of a writer."""

    def __init__(self) -> None:
        self.open = True
        self.records: list[Record] = []

    def put(self, record: Record) -> None:
        self.records.append(record)


def recorder(share: float = 1.0) -> tuple[SelectionRecorder, Kept]:
    kept = Kept()
    made = SelectionRecorder(layers=[3, 5], max_batch=6, top_k=4, share=share, device="cpu", writer=kept)  # type: ignore[arg-type]
    return made, kept


def test_rows_of_real_requests_in_recorded_layers() -> None:
    made, kept = recorder()
    selections = {layer: torch.randint(-1, 50, (4, 4), dtype=torch.int32) for layer in (3, 4, 5)}
    for layer, selected in selections.items():
        made.on_select(layer, selected)
    made.after_decode(["a", "b"], torch.tensor([8, 9, 1, 1]))  # two rows of padding
    for selected in selections.values():
        selected.fill_(-7)
    (record,) = kept.records
    assert record.rids == ["a", "b"] and record.seq_lens is not None
    assert record.seq_lens.tolist() == [8, 9]
    assert record.positions.shape == (2, 2, 4) and int(record.positions.min()) >= -1


def test_sampling_is_by_request_and_of_the_asked_share() -> None:
    rids = [f"request-{i}" for i in range(4000)]
    made, _ = recorder(share=0.1)
    chosen = made._sampled_rows(rids)
    assert chosen == recorder(share=0.1)[0]._sampled_rows(rids)
    assert 300 < len(chosen) < 500
    assert set(chosen) < set(recorder(share=0.3)[0]._sampled_rows(rids))
    assert len(recorder(share=1.0)[0]._sampled_rows(rids)) == len(rids)


def test_seeds_of_groups_are_joined_and_those_of_a_warm_up_forgotten() -> None:
    made, kept = recorder()
    warm_up = torch.full((3, 2), 9, dtype=torch.int32)
    for layer in (3, 4, 5):
        made.on_seed(layer, warm_up)
    made.begin_extend()
    for group in (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])):
        for layer in (3, 4, 5):
            made.on_seed(layer, (group + layer).int())
    made.after_extend(["a", "b", "c"])
    (record,) = kept.records
    assert record.seq_lens is None and record.rids == ["a", "b", "c"]
    assert record.positions.tolist() == [[[4, 5], [6, 7], [8, 9]], [[6, 7], [8, 9], [10, 11]]]


def test_a_closed_trace_keeps_nothing() -> None:
    made, kept = recorder()
    kept.open = False
    made.on_seed(3, torch.zeros(1, 2, dtype=torch.int32))
    made.after_extend(["a"])
    made.after_decode(["a"], torch.tensor([3]))
    assert kept.records == [] and made._candidates == [[], []]


def test_the_coordinator_records_what_swap_in_gets(tmp_path: Path) -> None:
    scheduler = FakeScheduler(debug=False)
    coordinator = scheduler.coordinator
    writer = TraceWriter(tmp_path, {"page_size": PAGE_SIZE, "layers": [LAYERS.start]}, 2**20)
    coordinator.recorder = SelectionRecorder(
        layers=[LAYERS.start], max_batch=REGIONS, top_k=TOP_K, share=1.0, device="cpu", writer=writer
    )
    scheduler.extend({2: 3 * BUFFER, 3: 5})
    coordinator.after_extend(["two", "three"])
    owners = coordinator.hot_buffer.owners[0, 2].clone()
    for _ in range(7):
        scheduler.decode([3, 2], anywhere, padding=1)
        coordinator.after_decode(["three", "two"], torch.tensor([scheduler.seq_lens[3], scheduler.seq_lens[2], 1]))
    writer.close()
    trace = read_trace(tmp_path)
    assert trace.request.tolist() == [0, 1] * 7 and set(trace.layer) == {LAYERS.start}
    assert trace.seq_len[trace.request == 1].tolist() == list(range(3 * BUFFER + 1, 3 * BUFFER + 8))
    seeded = trace.seed_of(1, LAYERS.start)[:BUFFER]
    np.testing.assert_array_equal(seeded, owners[: len(seeded)].numpy())
    in_range = (trace.selected >= 0) & (trace.selected < trace.seq_len[:, None])
    assert int(in_range.sum()) == int(coordinator.counters[0].sum()) > 0
    row_bytes = scheduler.row_format.row_bytes
    stored = 3 * BUFFER + 5 + 2 * 7
    assert coordinator.statistics()["backed_up_bytes"] == stored * row_bytes * len(LAYERS)
