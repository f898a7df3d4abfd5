"""What a long life of the pool costs swap-in: slots as SGLang's allocator hands them out after thousands of requests.

    python benchmark/kernel/age_pool.py [--requests 2000] [--pool-gb 8] [--batches 32 64 128]

Drives SGLang's own paged allocator: prompts of mixed length prefilled in chunks, many requests decoding side by side,
pages freed as they finish. Then times swap-in of the requests that are alive, against the same requests in a fresh
pool.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from hisparse.bench.setup import CONTEXT, DEVICE, PAGE, Cell, HostPool, Layer, Steps
from hisparse.bench.timing import Timing

CHUNK = 8192


@dataclass
class Request:
    prompt: int
    left: int
    slots: list[torch.Tensor] = field(default_factory=list)
    length: int = 0


class Pool:
    """A pool in use: requests come, decode side by side, and go."""

    def __init__(self, num_slots: int, seed: int) -> None:
        kv_cache = type("NoCache", (), {})()
        self.allocator = PagedTokenToKVPoolAllocator(num_slots, PAGE, torch.bfloat16, DEVICE, kv_cache, need_sort=False)
        self.source = random.Random(seed)
        self.running: list[Request] = []
        self.finished = 0

    def grow(self, request: Request, tokens: int) -> bool:
        """Allocate as SGLang's extend does; False where the pool is full."""
        before, after = request.length, request.length + tokens
        last = request.slots[-1][-1:] if request.slots else torch.full((1,), -1, device=DEVICE)
        if self.allocator.available_size() < tokens + PAGE:
            return False
        lens = [torch.tensor([before]), torch.tensor([after])]
        out = self.allocator.alloc_extend(
            lens[0].to(DEVICE), lens[0], lens[1].to(DEVICE), lens[1], last.to(torch.int64), tokens
        )
        assert out is not None
        request.slots.append(out)
        request.length = after
        return True

    def free(self, request: Request) -> None:
        if request.slots:
            self.allocator.free(torch.cat(request.slots))

    def admit(self) -> bool:
        prompt = int(min(max(self.source.lognormvariate(9.6, 0.9), 200), 100_000)) // PAGE * PAGE
        request = Request(prompt, self.source.randrange(1, 40))
        while request.length < prompt:
            if not self.grow(request, min(CHUNK, prompt - request.length)):
                self.free(request)
                return False
        self.running.append(request)
        return True

    def tick(self) -> None:
        """A page more for every running request, all at once as in decode; those at their end go."""
        for request in list(self.running):
            request.left -= 1
            if request.left < 0:
                self.free(request)
                self.running.remove(request)
                self.finished += 1
        pages = self.allocator.alloc(PAGE * len(self.running))
        while pages is None:  # SGLang retracts
            self.free(self.running.pop())
            pages = self.allocator.alloc(PAGE * len(self.running))
        for request, slots in zip(self.running, pages.view(-1, PAGE), strict=True):
            request.slots.append(slots)
            request.length += PAGE

    def live(self, requests: int, concurrent: int) -> None:
        while self.finished < requests:
            while len(self.running) < concurrent and self.admit():
                pass
            self.tick()

    def tables(self, count: int) -> list[torch.Tensor]:
        """Slots of the longest running requests."""
        longest = sorted(self.running, key=lambda request: -request.length)[:count]
        return [torch.cat(request.slots)[:CONTEXT] for request in longest]


def runs_per_100_pages(tables: list[torch.Tensor]) -> float:
    """Stretches of neighbouring pages, in 100 pages."""
    pages = [table[::PAGE] // PAGE for table in tables]
    runs = sum(int((p.diff() != 1).sum()) + 1 for p in pages)
    return 100 * runs / sum(len(p) for p in pages)


def place(layer: Layer, tables: list[torch.Tensor]) -> None:
    """Repeat each request's slots up to the context that the selections are drawn from."""
    for region in range(layer.regions):
        table = tables[region % len(tables)]
        layer.req_to_token[region] = table.repeat(CONTEXT // len(table) + 1)[:CONTEXT].int()


def fresh(tables: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same lengths, one request after the other in an empty pool."""
    starts = torch.tensor([0] + [len(table) for table in tables]).cumsum(0) + PAGE
    return [torch.arange(len(t), device=DEVICE) + int(starts[i]) // PAGE * PAGE for i, t in enumerate(tables)]


def step_us(layer: Layer, cell: Cell, rounds: int) -> float:
    layer.forget()
    steps = Steps(cell, layer)
    return Timing(rounds).device_us([lambda i=i: layer.swap_in(steps, i) for i in range(steps.count)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrent", type=int, default=10_000, help="running requests, if the pool holds as many")
    parser.add_argument("--pool-gb", type=float, default=8.0, help="host memory of one layer")
    parser.add_argument("--rows", type=int, nargs="+", default=[656, 1152])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--misses", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    host = HostPool(int(options.pool_gb * 1e9))
    rows = []
    for row_bytes in options.rows:
        slots = host.rows(row_bytes).shape[0] - PAGE
        pool = Pool(slots, seed=0)
        pool.live(options.requests, options.concurrent)
        aged = pool.tables(max(options.batches))
        tables = {"fresh": fresh(aged), "aged": aged}
        for batch in options.batches:
            layer = Layer(row_bytes, 4096, batch, host, with_peer=False)
            for miss in options.misses:
                line: dict[str, float] = {"row": row_bytes, "batch": batch, "miss": miss}
                for name, slots_of in tables.items():
                    place(layer, slots_of)
                    line[name] = step_us(layer, Cell(row_bytes, "near", 4096, batch, miss), options.rounds)
                rows.append(line)
            del layer
        print(row_bytes, {name: round(runs_per_100_pages(t), 1) for name, t in tables.items()}, "runs in 100 pages")
    print("| row | batch | misses | fresh us | aged us | ratio |\n|---|---|---|---|---|---|")
    for line in rows:
        print(
            f"| {line['row']:.0f} | {line['batch']:.0f} | {line['miss']:.0f} % | {line['fresh']:.1f} | "
            f"{line['aged']:.1f} | {line['aged'] / line['fresh']:.2f} |"
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
