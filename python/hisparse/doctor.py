"""`hisparse doctor`: can this machine serve with HiSparse, and if not, what is missing?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hisparse.budget import GIB
from hisparse.cpu.environment import cpu_environment
from hisparse.device import cuda_devices
from hisparse.memory import free_memory_bytes

LOW_MEMORY_BYTES = 2 * GIB
"""Less free memory than a server of the demo's size needs."""


class Finding(NamedTuple):
    """One line of the report; `ok` None = for information."""

    ok: bool | None
    what: str
    detail: str


def doctor() -> int:
    """Print the report. Returns 1 if something keeps HiSparse from running here, else 0."""
    failed = False
    for finding in findings():
        mark = {True: "ok  ", False: "FAIL", None: "    "}[finding.ok]
        print(f"{mark} {finding.what:<16} {finding.detail}")
        failed |= finding.ok is False
    print("\nhisparse: " + ("problems found, see FAIL above" if failed else "ready to serve"))
    return int(failed)


def findings() -> Iterator[Finding]:
    """Every check, cheapest first. What needs SGLang runs in a process of its own, in a server's environment."""
    version = platform.python_version()
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(supported, "Python", version if supported else f"{version}; 3.11 or 3.12 is needed")
    yield _distribution("torch")
    yield _distribution("sglang")
    gpus = cuda_devices()
    yield Finding(None, "GPU", f"{gpus} found" if gpus else "none found; SGLang will run on the CPU")
    yield from _plugin(on_gpu=gpus > 0)
    yield _locked_memory(needed=gpus > 0)
    free = free_memory_bytes()
    detail = f"{free / GIB:.1f} GiB free" + (
        "" if free > LOW_MEMORY_BYTES else f"; {LOW_MEMORY_BYTES // GIB} GiB needed"
    )
    yield Finding(free > LOW_MEMORY_BYTES, "host memory", detail)
    yield Finding(None, "NUMA nodes", _numa_nodes())


def _distribution(name: str) -> Finding:
    try:
        return Finding(True, name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, name, "not installed")


def _plugin(*, on_gpu: bool) -> Iterator[Finding]:
    """Entry point, selection, version and hook targets, as a server's process would find them."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins", name="hisparse")
    selected = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if not points:
        yield Finding(False, "plug-in", "no entry point; install the package `sglang-hisparse` beside SGLang")
    elif selected and "hisparse" not in selected:
        yield Finding(False, "plug-in", f"not active: SGLANG_PLUGINS={','.join(selected)} leaves out hisparse")
    else:
        yield Finding(True, "plug-in", "active: installed and selected")
    environment = dict(os.environ) if on_gpu else {**os.environ, **cpu_environment()}
    probe = subprocess.run([sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, check=False)
    lines = [line.split("\t") for line in probe.stdout.splitlines() if "\t" in line]
    if not lines:
        last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        yield Finding(False, "hooks", f"SGLang could not be imported: {last}")
    for ok, what, detail in lines:
        yield Finding(ok == "ok", what, detail)


_PROBE = """
from hisparse.plugin import gate
for problem in gate.problems():
    print("fail", "SGLang fits", problem, sep="\\t")
for row in gate.hooks():
    found = gate.target_exists(row.target)
    print("ok" if found else "fail", "hook", row.target + ("" if found else " is missing"), sep="\\t")
"""


def _locked_memory(*, needed: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(True, "pinned memory", "no limit (ulimit -l)")
    detail = f"limit {soft / GIB:.3f} GiB (ulimit -l)"
    if not needed:
        return Finding(None, "pinned memory", detail + ", not needed without a GPU")
    # The driver pins without counting against the limit on most systems; a low limit is a hint, not a verdict.
    return Finding(None, "pinned memory", detail + "; raise it if the server cannot pin its host pool")


def _numa_nodes() -> str:
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) <= 1:
        return "1"
    return (
        f"{len(nodes)}; a host pool belongs on its GPU's node (numactl; with several GPUs SGLang's --numa-node), "
        "rows from another cross one more link"
    )
