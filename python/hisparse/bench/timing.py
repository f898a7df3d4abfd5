"""Device time of a step, without the time that the host takes to launch it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

MAX_LAUNCHES, HEAD_START_CYCLES = 150, 4_000_000
"""The host issues a replay in about 6 us; the device sleeps for about 2 ms first."""


class Timing(NamedTuple):
    """rounds: measurements of which the median counts. graph_a_step: a CUDA graph for each step, or one for all."""

    rounds: int = 5
    graph_a_step: bool = True

    def device_us(self, steps: Sequence[Callable[[], Any]]) -> float:
        """Median device time of one step, from graph replays that the host has issued in advance."""
        steps[0]()
        per_graph = 1 if self.graph_a_step else len(steps)
        graphs = [captured(steps[i : i + per_graph]) for i in range(0, len(steps), per_graph)]

        def replay() -> None:
            for graph in graphs:
                graph.replay()

        for _ in range(2):
            replay()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        first_ms = start.elapsed_time(end)
        # About 2 ms a measurement, and no more launches than the host can issue in its head start.
        repeats = max(1, min(int(2.0 / first_ms), MAX_LAUNCHES // len(graphs)))
        rounds, times = self.rounds, []
        if first_ms > 20:  # hundreds of MB a step: the first replay counts, and few suffice
            times.append(first_ms * 1000 / len(steps))
            rounds = 2
        for _ in range(rounds):
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            for _ in range(repeats):
                replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / (repeats * len(steps)))
        return statistics.median(times)

    def empty_us(self) -> float:
        """An empty kernel: the floor of every figure."""
        return self.device_us([lambda: torch.cuda._sleep(0)] * 24)


def captured(steps: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph
