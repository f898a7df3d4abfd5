"""Swap-in against its limits: a bare gather of the same rows, SGLang's own kernel, and an empty kernel.

    python benchmark/kernel/bench_swap_in.py --out build/bench

prints one table and writes it as swap_in.md and swap_in.json. What is measured, and how: `hisparse.bench.swap_in`;
`peer` = load_cache_to_device_buffer_mla of the installed sglang package with its default block size. `hisparse bench`
runs a part of it, without the peer.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from peer import Peer

from hisparse.bench.setup import HostPool
from hisparse.bench.swap_in import Sweep, table, verdict
from hisparse.bench.timing import Timing
from hisparse_kernel import cuda_ops


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

    sweep = Sweep(
        batches=options.batches,
        misses=options.misses,
        rows=options.rows,
        slots=options.slots,
        buffers=options.buffers,
        pool_gb=options.pool_gb,
        timing=Timing(options.rounds, not options.one_graph),
        shapes=[cuda_ops.LaunchShape(*map(int, shape.split("x"))) for shape in options.shapes or []],
        gates=options.gates or [],
        peer_of=None if options.no_peer else Peer,
    )
    cuda_ops.warm_up()
    pool = HostPool(int(options.pool_gb * 1e9))
    about = sweep.about(" ".join(sys.argv))
    print(about, flush=True)
    lines = sweep.run(
        pool,
        line_done=lambda line: print(*line.values(), verdict(line), flush=True),
        part_done=lambda lines: save(lines, about, options.out),
    )
    print(table(lines))
    failing = sum(bool(verdict(line)) for line in lines)
    empty_us = sweep.timing._replace(rounds=9).empty_us()
    print(f"{failing} of {len(lines)} lines miss a goal; empty kernel {about['empty_us']:.2f}, {empty_us:.2f} us")


def save(lines: list[dict[str, Any]], about: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "swap_in.json").write_text(json.dumps({"about": about, "cells": lines}, indent=1))
    (out / "swap_in.md").write_text(f"{json.dumps(about, indent=1)}\n\n{table(lines)}\n")


if __name__ == "__main__":
    main()
