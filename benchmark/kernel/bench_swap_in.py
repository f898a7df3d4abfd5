"""Swap-in against its limits: a bare gather of the same rows, SGLang's own kernel, and an empty kernel.

    python benchmark/kernel/bench_swap_in.py --out build/bench

prints one table and writes it as swap_in.md and swap_in.json. Every number is the device time of one step (one layer):
a CUDA graph of several steps is replayed with the host running ahead, so launches on the host are not measured; the
median of several such measurements is taken. The selections of a graph come back in a cycle so long that a
position has left the buffer when it returns: each step of each replay misses exactly the same share.

Columns: `ours` = hisparse_kernel.swap_in; `gather` = the missing rows alone, same rows in the same order, no
residency (the best of several grids); `peer` = load_cache_to_device_buffer_mla of the installed sglang package with
its default block size; `limit` = 1.25 * (gather + 3 us).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_setup import CONTEXT, TOP_K, Cell, HostPool, Layer, Steps

from hisparse_kernel import cuda_ops

SLACK_US = 3.0
MAX_LAUNCHES, HEAD_START_CYCLES = 150, 4_000_000
"""The host issues a replay in about 6 us; the device sleeps for about 2 ms first."""
GATHER_CTAS = (16, 132)
ZERO_MISS_LIMIT_US = {1: 6.0, 8: 6.0, 32: 6.0, 256: 10.0}


graph_a_step = True


def device_us(steps: list[Callable[[], Any]], rounds: int) -> float:
    """Median device time of one step, from graph replays that the host has issued in advance."""
    steps[0]()
    per_graph = 1 if graph_a_step else len(steps)
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
    times = []
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


def captured(steps: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph


def measure_ours(steps: Steps, layer: Layer, rounds: int) -> dict[str, Any]:
    layer.forget()
    ours = device_us([lambda i=i: layer.swap_in(steps, i) for i in range(steps.count)], rounds)
    misses_seen = layer.misses_per_step(steps)
    layer.check_rows(steps)
    return {"ours_us": ours, "misses_seen": misses_seen, "gb_per_s": steps.misses * layer.row_bytes / ours / 1000}


def measure_others(steps: Steps, layer: Layer, rounds: int, with_peer: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"misses": steps.misses}
    if steps.misses:
        grids = {}
        for ctas in GATHER_CTAS:
            cuda_ops.GATHER_CTAS = ctas
            grids[ctas] = device_us([lambda i=i: layer.gather(steps, i) for i in range(steps.count)], rounds)
        result |= {"gather_us": min(grids.values()), "gather_by_ctas": grids}
    else:
        result["gather_us"] = empty_us(rounds)
    if with_peer:
        peer = layer.peer(steps)
        result["peer_us"] = device_us([lambda i=i: peer.swap_in(i) for i in range(steps.count)], rounds)
    return result | {"limit_us": 1.25 * (result["gather_us"] + SLACK_US)}


def empty_us(rounds: int) -> float:
    return device_us([lambda: torch.cuda._sleep(0)] * 24, rounds)


def verdict(row: dict[str, Any]) -> str:
    """Which of the three demands a cell misses; empty when it meets all."""
    wrong = []
    if row["ours_us"] > row["limit_us"]:
        wrong.append("limit")
    if row["misses"] == 0 and row["ours_us"] > ZERO_MISS_LIMIT_US.get(row["batch"], float("inf")):
        wrong.append("zero-miss limit")
    if "peer_us" in row and row["ours_us"] > row["peer_us"]:
        wrong.append("peer")
    if row["misses_seen"] != row["misses"]:
        wrong.append(f"misses {row['misses_seen']}")
    return ", ".join(wrong)


def table(rows: list[dict[str, Any]]) -> str:
    head = ["row", "slots", "buffer", "batch", "miss %", "shape", "ours us", "gather us", "limit us", "peer us"]
    head += ["peer/ours", "GB/s", "misses goal"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        peer = row.get("peer_us")
        cells = (
            row["row_bytes"],
            row["slots"],
            row["buffer"],
            row["batch"],
            row["miss_percent"],
            row["shape"],
            f"{row['ours_us']:.1f}",
            f"{row['gather_us']:.1f}",
            f"{row['limit_us']:.1f}",
            f"{peer:.1f}" if peer else "",
            f"{peer / row['ours_us']:.2f}" if peer else "",
            f"{row['gb_per_s']:.1f}",
            verdict(row),
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--misses", type=int, nargs="+", default=[0, 5, 20, 100], help="percent")
    parser.add_argument("--rows", type=int, nargs="+", default=[656, 1152], help="bytes")
    parser.add_argument("--slots", nargs="+", default=["near", "far"])
    parser.add_argument("--buffers", type=int, nargs="+", default=[4096, 6144])
    parser.add_argument("--pool-gb", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-graph", action="store_true", help="one graph for all steps, not one for each")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--shapes", nargs="+", help="launch shapes (threads x CTAs x gate width) to try")
    parser.add_argument("--gates", type=int, nargs="+", help="gate widths to try where the default shape has a gate")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()

    global graph_a_step
    graph_a_step = not options.one_graph
    cuda_ops.warm_up()
    rows: list[dict[str, Any]] = []
    pool = HostPool(int(options.pool_gb * 1e9))
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "top_k": TOP_K,
        "context": CONTEXT,
        "pool_gb": options.pool_gb,
        "command": " ".join(sys.argv),
        "empty_us": empty_us(9),
    }
    print(about, flush=True)
    for buffer in options.buffers:
        for row_bytes in options.rows:
            layer = Layer(row_bytes, buffer, max(options.batches), pool, with_peer=not options.no_peer)
            for slots in options.slots:
                layer.place(slots)
                for batch in options.batches:
                    for miss_percent in options.misses:
                        cell = Cell(row_bytes, slots, buffer, batch, miss_percent)
                        rows += measure(cell, layer, options)
                save(rows, about, options.out)
            del layer
            torch.cuda.empty_cache()
    print(table(rows))
    failing = sum(bool(verdict(row)) for row in rows)
    print(f"{failing} of {len(rows)} lines miss a goal; empty kernel {about['empty_us']:.2f}, {empty_us(9):.2f} us")


def measure(cell: Cell, layer: Layer, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for each launch shape asked for."""
    default = cuda_ops.launch_shape
    shapes = [cuda_ops.LaunchShape(*map(int, shape.split("x"))) for shape in options.shapes or []]
    steps = Steps(cell, layer)
    others = measure_others(steps, layer, options.rounds, not options.no_peer)
    lines = []
    for shape in shapes or gates(default(cell.batch), options.gates):
        cuda_ops.launch_shape = lambda batch, chosen=shape: chosen
        ours = measure_ours(steps, layer, options.rounds)
        name = "x".join(map(str, shape))
        lines.append({**cell.as_dict(), "shape": name, "default": shape == default(cell.batch), **ours, **others})
        print(*lines[-1].values(), verdict(lines[-1]), flush=True)
    cuda_ops.launch_shape = default
    return lines


def gates(shape: cuda_ops.LaunchShape, widths: list[int] | None) -> list[cuda_ops.LaunchShape]:
    """The shape with each gate width asked for, where it has a gate at all."""
    if not widths or shape.gate_width == 0:
        return [shape]
    return [shape._replace(gate_width=width) for width in widths]


def save(rows: list[dict[str, Any]], about: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "swap_in.json").write_text(json.dumps({"about": about, "cells": rows}, indent=1))
    (out / "swap_in.md").write_text(f"{json.dumps(about, indent=1)}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
