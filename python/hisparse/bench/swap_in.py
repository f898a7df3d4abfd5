"""Swap-in against its limits: a bare gather of the same rows, an empty kernel, and another kernel if one is given.

Every number is the device time of one step (one layer): a CUDA graph of several steps is replayed with the host running
ahead, so launches on the host are not measured; the median of several such measurements is taken. The selections of a
graph come back in a cycle so long that a position has left the buffer when it returns: each step of each replay misses
exactly the same share.

Columns: `ours` = hisparse_kernel.swap_in; `gather` = the missing rows alone, same rows in the same order, no
residency (the best of several grids); `peer` = the other kernel; `limit` = 1.25 * (gather + 3 us).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from hisparse.bench.setup import CONTEXT, TOP_K, Cell, HostPool, Layer, Steps
from hisparse.bench.timing import Timing
from hisparse_kernel import cuda_ops

SLACK_US = 3.0
GATHER_CTAS = (16, 132)
ZERO_MISS_LIMIT_US = {1: 6.0, 8: 6.0, 32: 6.0, 256: 10.0}

Line = dict[str, Any]


class Peer(Protocol):
    """Another swap-in over the same rows and selections."""

    def swap_in(self, i: int) -> None: ...


@dataclass(frozen=True)
class Sweep:
    """What to measure. misses: percent. shapes: launch shapes instead of the default. gates: gate widths to try where
    the default shape has a gate. peer_of: makes the other kernel's side of the comparison."""

    batches: Sequence[int]
    misses: Sequence[int]
    rows: Sequence[int]
    slots: Sequence[str]
    buffers: Sequence[int]
    pool_gb: float
    timing: Timing = field(default_factory=Timing)
    shapes: Sequence[cuda_ops.LaunchShape] = ()
    gates: Sequence[int] = ()
    peer_of: Callable[[Layer, Steps], Peer] | None = None

    def about(self, command: str) -> Line:
        """The machine, for the record."""
        return {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "top_k": TOP_K,
            "context": CONTEXT,
            "pool_gb": self.pool_gb,
            "command": command,
            "empty_us": self.timing._replace(rounds=9).empty_us(),
        }

    def run(
        self, pool: HostPool, *, line_done: Callable[[Line], None], part_done: Callable[[list[Line]], None]
    ) -> list[Line]:
        """All cells. `line_done` gets each line as it is measured, `part_done` all lines so far now and then."""
        lines: list[Line] = []
        for buffer in self.buffers:
            for row_bytes in self.rows:
                layer = Layer(row_bytes, buffer, max(self.batches), pool, with_peer=self.peer_of is not None)
                for slots in self.slots:
                    layer.place(slots)
                    for batch in self.batches:
                        for miss_percent in self.misses:
                            for line in self.measure(Cell(row_bytes, slots, buffer, batch, miss_percent), layer):
                                lines.append(line)
                                line_done(line)
                    part_done(lines)
                del layer
                torch.cuda.empty_cache()
        return lines

    def measure(self, cell: Cell, layer: Layer) -> list[Line]:
        """One line for each launch shape asked for."""
        default = cuda_ops.launch_shape
        steps = Steps(cell, layer)
        others = self.measure_others(steps, layer)
        lines = []
        for shape in self.shapes or gated(default(cell.batch), self.gates):
            cuda_ops.launch_shape = partial(_always, shape)
            try:
                ours = self.measure_ours(steps, layer)
            finally:
                cuda_ops.launch_shape = default
            name = "x".join(map(str, shape))
            lines.append({**cell.as_dict(), "shape": name, "default": shape == default(cell.batch), **ours, **others})
        return lines

    def measure_ours(self, steps: Steps, layer: Layer) -> Line:
        layer.forget()
        ours = self.timing.device_us([partial(layer.swap_in, steps, i) for i in range(steps.count)])
        misses_seen = layer.misses_per_step(steps)
        layer.check_rows(steps)
        return {"ours_us": ours, "misses_seen": misses_seen, "gb_per_s": steps.misses * layer.row_bytes / ours / 1000}

    def measure_others(self, steps: Steps, layer: Layer) -> Line:
        result: Line = {"misses": steps.misses}
        if steps.misses:
            grids = {}
            for ctas in GATHER_CTAS:
                cuda_ops.GATHER_CTAS = ctas
                grids[ctas] = self.timing.device_us([partial(layer.gather, steps, i) for i in range(steps.count)])
            result |= {"gather_us": min(grids.values()), "gather_by_ctas": grids}
        else:
            result["gather_us"] = self.timing.empty_us()
        if self.peer_of is not None:
            peer = self.peer_of(layer, steps)
            result["peer_us"] = self.timing.device_us([partial(peer.swap_in, i) for i in range(steps.count)])
        return result | {"limit_us": 1.25 * (result["gather_us"] + SLACK_US)}


def _always(shape: cuda_ops.LaunchShape, batch: int) -> cuda_ops.LaunchShape:
    return shape


def gated(shape: cuda_ops.LaunchShape, widths: Sequence[int]) -> list[cuda_ops.LaunchShape]:
    """The shape with each gate width asked for, where it has a gate at all."""
    if not widths or shape.gate_width == 0:
        return [shape]
    return [shape._replace(gate_width=width) for width in widths]


def verdict(line: Line) -> str:
    """Which of the three demands a cell misses; empty when it meets all."""
    wrong = []
    if line["ours_us"] > line["limit_us"]:
        wrong.append("limit")
    if line["misses"] == 0 and line["ours_us"] > ZERO_MISS_LIMIT_US.get(line["batch"], float("inf")):
        wrong.append("zero-miss limit")
    if "peer_us" in line and line["ours_us"] > line["peer_us"]:
        wrong.append("peer")
    if line["misses_seen"] != line["misses"]:
        wrong.append(f"misses {line['misses_seen']}")
    return ", ".join(wrong)


def table(lines: Sequence[Line]) -> str:
    head = ["row", "slots", "buffer", "batch", "miss %", "shape", "ours us", "gather us", "limit us", "peer us"]
    head += ["peer/ours", "GB/s", "misses goal"]
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for line in lines:
        peer = line.get("peer_us")
        cells = (
            line["row_bytes"],
            line["slots"],
            line["buffer"],
            line["batch"],
            line["miss_percent"],
            line["shape"],
            f"{line['ours_us']:.1f}",
            f"{line['gather_us']:.1f}",
            f"{line['limit_us']:.1f}",
            f"{peer:.1f}" if peer else "",
            f"{peer / line['ours_us']:.2f}" if peer else "",
            f"{line['gb_per_s']:.1f}",
            verdict(line),
        )
        text.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(text)
