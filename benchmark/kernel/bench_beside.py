"""What runs beside swap-in: one layer's chain from the selection to attention, many times in a CUDA graph.

    python benchmark/kernel/bench_beside.py --batches 1 4 16 64 --misses 5 [--orders off early late] [--timeline]

The chain has the shapes of DeepSeek-V3.2: the query's `w_kc` product (128 heads), a small kernel for the rotary
embedding, the store of the new row, the concatenation, and a matrix product in attention's place; `q_b_proj` runs
beside the indexer as in SGLang. Orders of swap-in:

    off     none
    serial  after the store, on the same stream
    early   on its own stream from the selection on; the concatenation waits for it
    late    likewise, but only attention waits, and the store too runs beside the concatenation (what the plug-in does)

Prints us a layer; with --timeline also when each kernel begins and ends after the selection.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter, defaultdict
from copy import copy
from pathlib import Path
from typing import Any

import torch

from hisparse.bench.setup import CONTEXT, DEVICE, PAGE, TOP_K, Cell, HostPool, Layer, Steps
from hisparse.row_format import Bf16Row
from hisparse.side_stream import SideStream
from hisparse_kernel import cuda_ops

ORDERS = ("off", "serial", "early", "late")
LAYERS, GRAPHS, ROUNDS, BUFFER, HEADS, ROW = 8, 3, 6, 4096, 128, 1152
NAMES = {"swap_in": "swap-in", "store_kernel": "store", "CatArray": "concat", "elementwise": "rope"}


class Chain:
    """Tensors of the chain and its captured graphs."""

    def __init__(self, pool: HostPool, batch: int, misses: int, order: str) -> None:
        self.order = order
        self.layer = Layer(ROW, BUFFER, batch, pool, with_peer=False)
        self.layer.place("near")
        self.layer.forget()
        self.steps = Steps(Cell(ROW, "near", BUFFER, batch, misses), self.layer)
        self.selected = torch.empty(batch, TOP_K, dtype=torch.int32, device=DEVICE)
        self.current = copy(self.steps)  # the only step that swap-in sees: what was just selected
        self.current.selected = self.selected.unsqueeze(0)
        self.none = torch.full_like(self.selected, -1)
        self.slots = self.layer.req_to_token[1 : batch + 1, CONTEXT - 1].contiguous()
        self.q_lora, self.q_b_proj = _random(batch, 1536), [_random(1536, HEADS * 192) for _ in range(LAYERS)]
        self.q, self.q_nope = _random(batch, HEADS * 192), _random(HEADS, batch, 128)
        self.w_kc = [_random(HEADS, 512, 128).transpose(1, 2) for _ in range(LAYERS)]
        self.absorbed, self.q_rope = _random(HEADS, batch, 512), _random(batch, HEADS, 64)
        self.k_nope, self.k_rope = _random(batch, 1, 512), _random(batch, 1, 64)
        self.q_all = _random(batch, HEADS, 576)
        self.left, self.right, self.product = _random(128, 4096), _random(4096, 4096), _random(128, 4096)
        device = torch.device(DEVICE)
        self.query_beside, self.swap_in_beside, self.store_beside = (SideStream(device) for _ in range(3))
        for layer in range(2):
            self.run(layer, layer)
        torch.cuda.synchronize()
        self.graphs = []
        for first in range(0, GRAPHS * LAYERS, LAYERS):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for layer in range(LAYERS):
                    self.run((first + layer) % self.steps.count, layer)
            self.graphs.append(graph)

    def run(self, step: int, layer: int) -> None:
        with self.query_beside.fork():
            torch.mm(self.q_lora, self.q_b_proj[layer], out=self.q)
        torch.mm(self.left, self.right, out=self.product)  # the indexer
        torch.maximum(self.steps.selected[step], self.none, out=self.selected)  # the selection
        if self.order in ("early", "late"):
            with self.swap_in_beside.fork():
                self.layer.swap_in(self.current, 0)
        self.query_beside.join()
        torch.bmm(self.q_nope, self.w_kc[layer], out=self.absorbed)
        self.q_rope.mul_(1.0001)
        if self.order == "late":
            with self.store_beside.fork():
                self._store()
        else:
            self._store()
            self.swap_in_beside.join()
        if self.order == "serial":
            self.layer.swap_in(self.current, 0)
        torch.cat((self.absorbed.transpose(0, 1), self.q_rope), -1, out=self.q_all)
        self.swap_in_beside.join()
        self.store_beside.join()
        torch.mm(self.left, self.right, out=self.product)  # attention

    def _store(self) -> None:
        cuda_ops.store_decode(
            k_nope=self.k_nope, k_rope=self.k_rope, slots=self.slots, seq_lens=self.steps.seq_lens,
            req_pool_indices=self.steps.req_pool_indices, num_real_reqs=self.steps.num_real_reqs,
            host_rows=self.layer.host, hot_rows=self.layer.hot, device_buffer_size=BUFFER, page_size=PAGE,
            row_format=Bf16Row(),
        )  # fmt: skip

    def replay(self) -> None:
        for graph in self.graphs:
            graph.replay()

    def us_a_layer(self) -> float:
        """Median of three, the host's launches issued in advance."""
        self.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(3):
            torch.cuda._sleep(2_000_000)
            start.record()
            for _ in range(ROUNDS):
                self.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / (ROUNDS * GRAPHS * LAYERS))
        return statistics.median(times)

    def timeline(self) -> str:
        """Of each kernel between selection and attention: begin and end, us after the selection's end, medians."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.replay()
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profiler.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        selected_at, seen = None, Counter[str]()
        for event in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"]):
            begin, end = event["ts"], event["ts"] + event["dur"]
            if "maximum" in event["name"].lower():
                selected_at, seen = end, Counter()
            elif selected_at is not None:
                name = _short(event, seen)
                if seen[name] <= 1:
                    spans[name].append((begin - selected_at, end - selected_at))
        medians = sorted(
            (statistics.median(b for b, _ in s), statistics.median(e for _, e in s), n) for n, s in spans.items()
        )
        return ", ".join(f"{name} {begin:.1f} to {end:.1f}" for begin, end, name in medians)


def _short(event: dict[str, Any], seen: Counter[str]) -> str:
    """A name for a kernel; of the products the first is `w_kc`'s and the second stands for attention."""
    for part, name in NAMES.items():
        if part in event["name"]:
            seen[name] += 1
            return name
    seen["product"] += 1
    name = {1: "w_kc", 2: "attention"}.get(seen["product"], "other")
    seen[name] += 1
    return name


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--misses", type=int, nargs="+", default=[5], help="percent of top-k")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--pool-gb", type=float, default=4.0)
    parser.add_argument("--timeline", action="store_true")
    options = parser.parse_args()
    cuda_ops.warm_up()
    pool = HostPool(int(options.pool_gb * 1e9))
    print("| batch | misses | order | us a layer |", "|---:|---:|---|---:|", sep="\n")
    for batch in options.batches:
        for misses in options.misses:
            for order in options.orders:
                chain = Chain(pool, batch, misses, order)
                print(f"| {batch} | {misses} % | {order} | {chain.us_a_layer():.1f} |", flush=True)
                if options.timeline:
                    print(f"  {chain.timeline()}", flush=True)


if __name__ == "__main__":
    main()
