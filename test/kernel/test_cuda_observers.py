"""What watches swap-in on a GPU, inside replayed graphs: the timer, the counters' copy, and the recorder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hisparse.plugin.snapshot import CounterSnapshot
from hisparse.recorder import SelectionRecorder
from hisparse.swap_in_timer import SwapInTimer, working_timer
from hisparse.trace_format import read_trace
from hisparse.trace_writer import TraceWriter

pytestmark = pytest.mark.gpu

CYCLES = 5_000_000
MANY_CYCLES = 200_000_000
"""A tenth of a second: longer than the host needs to look."""


def timed_graph(timer: SwapInTimer, cycles: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        timer.start()
        torch.cuda._sleep(cycles)
        timer.stop()
    return graph


def test_the_timer_measures_the_replayed_graph() -> None:
    timer = working_timer(3, torch.device("cuda"))
    assert timer is not None and timer.layer == 3
    assert timer.take() is None
    short, long = (timed_graph(timer, cycles) for cycles in (CYCLES, 4 * CYCLES))
    assert timer.take() is None, "captured only"
    seconds = {}
    for graph in (short, long, short):
        graph.replay()
        torch.cuda.synchronize()
        seconds[graph] = timer.take()
    assert seconds[short] is not None and seconds[long] is not None
    assert 1e-4 < seconds[short] < 0.1
    assert 2 < seconds[long] / seconds[short] < 8


def test_the_timer_never_waits_or_mixes_two_steps() -> None:
    timer = working_timer(0, torch.device("cuda"))
    assert timer is not None
    graph = timed_graph(timer, CYCLES)
    graph.replay()
    torch.cuda.synchronize()
    usual = timer.take()
    assert usual is not None
    for _ in range(50):
        graph.replay()
        found = timer.take()
        assert found is None or 0.3 * usual < found < 3 * usual
    torch.cuda.synchronize()


def test_a_snapshot_arrives_in_stream_order_without_a_wait() -> None:
    counters = torch.zeros((4, 3), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    snapshot = CounterSnapshot(counters, stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(MANY_CYCLES)
        counters += 1
    snapshot.enqueue()
    assert int(snapshot.read().sum()) == 0, "read waited for the device"
    snapshot.enqueue()  # one is under way
    with torch.cuda.stream(stream):
        counters += 1
    assert snapshot.read(wait=True).tolist() == [[1] * 3] * 4
    snapshot.enqueue()
    assert snapshot.read(wait=True).tolist() == [[2] * 3] * 4


def test_a_graphs_selections_are_recorded_step_by_step(tmp_path: Path) -> None:
    layers, batch, top_k, steps = [1, 4], 4, 64, 30
    writer = TraceWriter(tmp_path, {"page_size": 64, "layers": layers}, 2**30)
    recorder = SelectionRecorder(
        layers=layers, max_batch=batch + 2, top_k=top_k, share=1.0, device="cuda", writer=writer
    )
    selected = torch.zeros((5, batch, top_k), dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(5):
            recorder.on_select(layer, selected[layer])
    inputs = torch.randint(-1, 5000, (steps, 5, batch, top_k), dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), 6000, device="cuda")
    candidates = torch.randint(-1, 5000, (3, 4 * top_k), dtype=torch.int32, device="cuda")
    recorder.begin_extend()
    for layer in layers:
        recorder.on_seed(layer, candidates + (candidates >= 0))
    recorder.after_extend(["a", "b", "c"])
    candidates.fill_(-1)
    for step in range(steps):  # the host runs ahead: nothing here waits
        torch.cuda._sleep(CYCLES // 10)
        selected.copy_(inputs[step])
        graph.replay()
        lens = lens + 1
        recorder.after_decode(["a", "b", "c"], lens)
    selected.fill_(-1)
    writer.close()
    trace = read_trace(tmp_path)
    assert len(trace.step) == steps * len(layers) * 3
    found = torch.from_numpy(trace.selected).view(steps, len(layers), 3, top_k)
    expected = np.sort(inputs[:, layers, :3].cpu().numpy().view(np.uint32)).view(np.int32)  # ascending, -1 last
    assert torch.equal(found, torch.from_numpy(expected))
    assert trace.seq_len.reshape(steps, -1).tolist() == [[6001 + step] * 6 for step in range(steps)]
    assert (trace.seed_of(2, 4) > 0).all() and len(trace.seed_of(2, 4)) > top_k
