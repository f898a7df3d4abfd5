"""`hisparse bench`: measure this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hisparse.config import HiSparseError
from hisparse.device import cuda_devices
from hisparse.memory import free_memory_bytes

SLOTS = ("near", "far")
MAX_MEMORY_SHARE = 0.8


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 2 after one sentence about what cannot be."""
    parser = argparse.ArgumentParser(
        prog="hisparse bench",
        description="Link speed, near and far slots, and swap-in on this machine. Without a GPU: host memory, and the "
        "CPU back end's swap-in.",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="requests a step")
    parser.add_argument("--misses", type=int, nargs="+", default=[0, 5, 20], help="percent of top-k 2,048")
    parser.add_argument("--rows", type=int, nargs="+", default=[656, 1152], help="bytes of a row")
    parser.add_argument("--slots", nargs="+", default=list(SLOTS), help="near, far or both")
    parser.add_argument("--buffer", type=int, default=4096, help="LRU rows a request (default 4096)")
    parser.add_argument("--pool-gb", type=float, help="host pool to read from (default: 16 with a GPU, 1 without)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    gpu = cuda_devices() > 0
    if options.pool_gb is None:
        options.pool_gb = 16.0 if gpu else 1.0
    try:
        _check(options)
        figures = _on_gpu(options) if gpu else _on_cpu(options)
        if options.out is not None:
            _save(options.out, figures)
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(options: argparse.Namespace) -> None:
    for name, values, low, high in (
        ("batches", options.batches, 1, 1024),
        ("misses", options.misses, 0, 100),
        ("rows", options.rows, 16, 65_536),
    ):
        for value in values:
            if not low <= value <= high:
                raise HiSparseError(f"--{name} {value} must be from {low} to {high}.")
    for value in options.rows:
        if value % 16:
            raise HiSparseError(f"--rows {value} must be a multiple of 16.")
    for value in options.slots:
        if value not in SLOTS:
            raise HiSparseError(f"--slots {value} must be near or far.")
    if not 2048 <= options.buffer <= 32_704 or options.buffer % 64:
        raise HiSparseError(f"--buffer {options.buffer} must be a multiple of 64 from 2048 to 32704.")
    usable = free_memory_bytes() * MAX_MEMORY_SHARE
    smallest = 0.5
    if not smallest <= options.pool_gb <= usable / 1e9:
        raise HiSparseError(
            f"--pool-gb {options.pool_gb:g} must be from {smallest} to {usable / 1e9:.1f}, {MAX_MEMORY_SHARE:.0%} of "
            f"the free memory."
        )


def _on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise HiSparseError(
            f"there is a GPU, but torch {torch.__version__} cannot use it; install a build of torch with CUDA."
        )
    from hisparse.bench import link, swap_in
    from hisparse.bench.setup import HostPool
    from hisparse.bench.timing import Timing
    from hisparse_kernel import cuda_ops

    print("hisparse: loading the kernels (compiled at the first time)", flush=True)
    cuda_ops.warm_up()
    timing = Timing()
    sweep = swap_in.Sweep(
        batches=options.batches,
        misses=options.misses,
        rows=options.rows,
        slots=options.slots,
        buffers=[options.buffer],
        pool_gb=options.pool_gb,
        timing=timing,
    )
    pool = HostPool(int(options.pool_gb * 1e9))
    about = sweep.about("hisparse bench")
    print(f"{about['gpu']}, pool {options.pool_gb:g} GB; empty kernel {about['empty_us']:.1f} us\n")
    copies = link.copy_rates(pool, timing)
    rates = [link.row_rate(pool, row_bytes, timing) for row_bytes in options.rows]
    print(link.text(*copies, rates) + "\n", flush=True)
    cells = len(options.rows) * len(options.slots) * len(options.batches) * len(options.misses)
    with _bar(cells) as bar:
        lines = sweep.run(pool, line_done=lambda line: bar.update(), part_done=lambda lines: None)
    print("Swap-in, us a layer, beside a bare gather of the same rows (limit: 1.25 x (gather + 3 us)):\n")
    print(swap_in.table(lines))
    link_figures = {"host_to_device": copies[0], "device_to_host": copies[1], "rows": [r._asdict() for r in rates]}
    return {"about": about, "link_gb_s": link_figures, "cells": lines}


def _on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from hisparse.bench import host

    print("hisparse: no GPU found. Not measured:")
    for what in host.NOT_MEASURED:
        print(f"  {what}")
    print(f"\nHost memory, {torch.get_num_threads()} threads, pool {options.pool_gb:g} GB:")
    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "rows": []}
    for row_bytes in options.rows:
        copy, gather = host.memory_rates(int(options.pool_gb * 1e9), row_bytes)
        print(f"  one large copy {copy:.1f} GB/s, random rows of {row_bytes:,} B {gather:.1f} GB/s", flush=True)
        figures["rows"].append({"row_bytes": row_bytes, "copy_gb_s": copy, "gather_gb_s": gather})
    row_bytes = options.rows[-1]
    print(f"\nSwap-in of the CPU back end, ms a layer (top-k 2,048, buffer 4,096, rows of {row_bytes:,} B):\n")
    print("| batch | miss % | ms |\n|---|---|---|")
    figures["swap_in"] = []
    for batch, percent, ms in host.swap_in_ms(row_bytes, tuple(options.batches), tuple(options.misses)):
        print(f"| {batch} | {percent} | {ms:.1f} |", flush=True)
        figures["swap_in"].append({"batch": batch, "miss_percent": percent, "ms": ms})
    return figures


def _save(path: Path, figures: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise HiSparseError(f"--out {path} cannot be written: {error.strerror}.") from None
    print(f"\nFigures: {path}")


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="cell", leave=False, disable=None)
