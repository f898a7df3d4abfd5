"""`hisparse simulate`: options, table, pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.config import HiSparseError
from hisparse.link import link_rate
from hisparse.simulator.library import NAMES
from hisparse.simulator.policies import OWN, WITH_PARAMETER
from hisparse.simulator.simulate import (
    Outcome,
    gap_closed,
    parse_buffers,
    parse_policies,
    regions_of,
    simulate,
)
from hisparse.trace_format import Trace, TraceError, read_trace

DEFAULT_ROW_BYTES = 1152
HEAD = ("buffer", "policy", "hits", "rows missed", "KB a step", "us a step", "of LRU's gap closed")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 2 after one sentence about what cannot be."""
    own = ", ".join(f"{name}[:NUMBER]" if name in WITH_PARAMETER else name for name in OWN)
    parser = argparse.ArgumentParser(
        prog="hisparse simulate",
        description="Replay recorded selections with other buffer sizes and replacement policies.",
        epilog=f"Policies: {own}. With libCacheSim installed also {', '.join(NAMES)}. belady is the optimum that "
        "knows the future; lru is what the server does.",
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a .npz file or a folder of them")
    parser.add_argument("--buffer", default="1x,2x,4x", help="LRU rows, or multiples of top-k (default 1x,2x,4x)")
    parser.add_argument("--policy", default="lru,belady", help="comma-separated (default lru,belady)")
    parser.add_argument("--row-bytes", type=int, help=f"default: the trace's, else {DEFAULT_ROW_BYTES}")
    parser.add_argument("--link-gb-s", type=float, help="what the link carries, from `hisparse bench`")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw hit rate against buffer size")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (HiSparseError, TraceError) as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    for name, value in (("row-bytes", options.row_bytes), ("link-gb-s", options.link_gb_s)):
        if value is not None and not 0 < value < 1e6:
            raise HiSparseError(f"--{name} {value} must be positive and below a million.")
    policies = parse_policies(options.policy)
    if options.plot is not None:
        from hisparse.plotting import require_matplotlib

        require_matplotlib()
    everything = []
    for path in options.traces:
        trace = read_trace(path)
        outcomes = outcomes_of(trace, parse_buffers(options.buffer, trace.top_k), policies)
        row_bytes = options.row_bytes or int(trace.about.get("row_bytes", DEFAULT_ROW_BYTES))
        rate = link_rate(row_bytes, options.link_gb_s).near
        print(describe(path, trace) + "\n\n" + table(outcomes, row_bytes, rate) + "\n", flush=True)
        everything.append((path.stem, outcomes))
    if options.plot is not None:
        from hisparse.simulator.plot import plot

        plot(everything, options.plot)
        print(f"Picture: {options.plot}")


def outcomes_of(trace: Trace, buffers: Sequence[int], policies: Sequence[str]) -> list[Outcome]:
    """Every policy with every buffer; a progress bar on stderr where that is a terminal."""
    regions = regions_of(trace)
    runs = [(buffer, policy) for buffer in buffers for policy in policies]
    with _bar(len(runs) * len(regions)) as bar:
        return [simulate(trace, regions, buffer=buffer, policy=policy, done=bar.update) for buffer, policy in runs]


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, unit="region", leave=False, disable=None)


class _NoBar:
    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def update(self) -> None: ...


def describe(path: Path, trace: Trace) -> str:
    """What the trace is, in two lines."""
    layers, requests, steps = (len(np.unique(column)) for column in (trace.layer, trace.request, trace.step))
    regions = sum(1 for _ in trace.sequences())
    about = str(trace.about.get("workload", trace.about.get("model", "")))
    seeded = len(set(zip(trace.seed_request.tolist(), trace.seed_layer.tolist(), strict=True)))
    note = ""
    if seeded < regions:
        note = (
            f"\nNot counted: the first step of {regions - seeded} of {regions} regions; the trace does not say what "
            f"the prefill left."
        )
    return (
        f"{path}: {about}\n{steps} steps, {layers} layers, {requests} requests, top-k {trace.top_k}, longest request "
        f"{int(trace.seq_len.max(initial=0)):,} tokens{note}"
    )


def table(outcomes: Sequence[Outcome], row_bytes: int, rate: float) -> str:
    """A row a buffer and policy. Bytes and time are of a whole step: all recorded layers and requests."""
    rows = [HEAD, *_rows(outcomes, row_bytes, rate)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if column == 1 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _rows(outcomes: Sequence[Outcome], row_bytes: int, rate: float) -> Iterator[tuple[str, ...]]:
    for outcome in outcomes:
        gap = gap_closed(outcome, outcomes)
        yield (
            str(outcome.buffer),
            outcome.policy,
            f"{outcome.hit_rate:.2%}",
            f"{outcome.misses_a_selection:.2f}",
            f"{outcome.bytes_a_step(row_bytes) / 1e3:,.1f}",
            f"{outcome.seconds_a_step(row_bytes, rate) * 1e6:.1f}",
            "" if gap is None else f"{gap:.0%}",
        )
