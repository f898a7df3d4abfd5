"""Where a decode step's time goes, from SGLang's own profiler (torch): kernels a step, and what the host spends in us.

    python benchmark/serving/profile_decode.py TRACE.json.gz [--steps 10] [--top 30]

`bench_concurrency.py --profile` records such traces, one a server.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from hisparse.local_server import LocalServer

STEPS = 10
ATTENTION = "sparse_attn_fwd_kernel"
OURS = re.compile(r"python/hisparse/|hisparse_kernel/")


def record(server: LocalServer, folder: Path, steps: int = STEPS, patience_s: float = 60) -> Path | None:
    """Profile a server's next steps; the trace file, or None if none came in time."""
    folder.mkdir(parents=True, exist_ok=True)
    server.post(
        "/start_profile",
        {"output_dir": str(folder), "num_steps": steps, "activities": ["CPU", "GPU"], "with_stack": True},
    )
    deadline = time.monotonic() + patience_s
    size = -1
    while time.monotonic() < deadline:
        time.sleep(1.5)
        found = sorted(folder.rglob("*.json.gz"))
        if found and found[0].stat().st_size == size > 0:
            return found[0]
        size = found[0].stat().st_size if found else -1
    return None


def summarise(trace: Path, steps: int = STEPS) -> dict[str, Any]:
    """Kernel time by name, and the host's time in our own Python, in us a step."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    on_gpu = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    kernels: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    host = 0.0
    for event in events:
        category, name = event.get("cat", ""), event.get("name", "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels[short(name)].append(event["dur"])
            spans.append((event["ts"], event["ts"] + event["dur"]))
        elif category == "python_function" and OURS.search(name):
            host += event["dur"]
    return {
        "layer": layer_timeline(on_gpu),
        "gpu_busy_us": union(spans) / steps,
        "span_us": (max(e for _, e in spans) - min(s for s, _ in spans)) / steps if spans else 0.0,
        "ours_on_the_host_us": host / steps,
        "kernels": sorted(
            ((name, len(times) / steps, sum(times) / steps) for name, times in kernels.items()), key=lambda row: -row[2]
        ),
    }


def layer_timeline(kernels: list[dict[str, Any]]) -> list[tuple[float, float, int, str]]:
    """A layer from the middle of the profile, from the end of one attention to the end of the next: when each kernel
    begins and how long it takes (us), its stream, its name."""
    attention = [i for i, kernel in enumerate(kernels) if ATTENTION in kernel["name"]]
    if len(attention) < 3:
        return []
    first, last = attention[len(attention) // 2 : len(attention) // 2 + 2]
    zero = kernels[first]["ts"] + kernels[first]["dur"]
    return [(k["ts"] - zero, k["dur"], k["tid"], short(k["name"])) for k in kernels[first + 1 : last + 1]]


def union(spans: list[tuple[float, float]]) -> float:
    """Total length of overlapping intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def short(name: str) -> str:
    """A kernel's name without its template arguments and parameters."""
    name = re.sub(r"^void ", "", name)
    return re.split(r"[<(]", name)[0][-70:] or name[:70]


def table(summary: dict[str, Any], top: int = 30) -> str:
    lines = [
        f"a step: {summary['span_us']:.0f} us, GPU busy {summary['gpu_busy_us']:.0f} us, "
        f"our Python on the host {summary['ours_on_the_host_us']:.0f} us",
        "| kernel | calls a step | us a step | us a call |",
        "|---|---:|---:|---:|",
    ]
    for name, calls, us in summary["kernels"][:top]:
        lines.append(f"| {name} | {calls:.1f} | {us:.1f} | {us / calls:.2f} |")
    lines += ["", "One layer, from attention to attention:"]
    lines += ["| at us | takes | stream | kernel |", "|---:|---:|---:|---|"]
    lines += [f"| {at:.1f} | {us:.1f} | {stream} | {name} |" for at, us, stream, name in summary["layer"]]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--top", type=int, default=30)
    options = parser.parse_args()
    print(table(summarise(options.trace, options.steps), options.top))
