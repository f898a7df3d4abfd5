"""What swap-in is measured on: a host pool, one layer's state, and selections with a fixed miss rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from hisparse_kernel import cuda_ops

TOP_K = 2048
CONTEXT = 131_072
PAGE = 64
DEVICE = "cuda"


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    row_bytes: int
    slots: str
    buffer: int
    batch: int
    miss_percent: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class HostPool:
    """Pinned host memory full of random bytes, divided into rows as each layer needs."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        block = torch.randint(0, 256, (1 << 28,), dtype=torch.uint8, device=DEVICE)
        for start in range(0, num_bytes, block.numel()):
            part = self._bytes[start : start + block.numel()]
            part.copy_(block[: part.numel()].roll(start // block.numel() * 16), non_blocking=True)
        torch.cuda.synchronize()

    def rows(self, row_bytes: int) -> torch.Tensor:
        count = self._bytes.numel() // row_bytes // PAGE * PAGE
        return self._bytes[: count * row_bytes].view(count, row_bytes)


class Layer:
    """Hot rows and residency state of one layer. with_peer: also `req_to_host`, which another kernel may want."""

    def __init__(self, row_bytes: int, buffer: int, batch: int, pool: HostPool, with_peer: bool) -> None:
        self.row_bytes, self.buffer = row_bytes, buffer
        self.host = pool.rows(row_bytes)
        self.regions = batch + 1
        self.region_rows = buffer + PAGE
        self.hot = torch.zeros(self.regions * self.region_rows, row_bytes, dtype=torch.uint8, device=DEVICE)
        self.owners = torch.empty(self.regions, buffer, dtype=torch.int32, device=DEVICE)
        self.lru_order = torch.empty(self.regions, buffer, dtype=torch.int16, device=DEVICE)
        self.tail_start = torch.full((self.regions,), CONTEXT, dtype=torch.int32, device=DEVICE)
        self.counters = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        self.req_to_token = torch.empty(self.regions, CONTEXT, dtype=torch.int32, device=DEVICE)
        self.req_to_host = torch.empty(self.regions, CONTEXT, dtype=torch.int64, device=DEVICE) if with_peer else None
        # Positions of each request in a random order: selections are cut from it. The newest page is left out.
        keys = torch.rand(self.regions, CONTEXT - PAGE, device=DEVICE)
        self.positions = keys.argsort(1).int()

    def place(self, slots: str) -> None:
        """near: each request's slots in a row; far: its pages anywhere in the pool."""
        num_slots = self.host.shape[0]
        offsets = torch.arange(CONTEXT, device=DEVICE)
        if slots == "near":
            starts = torch.linspace(0, (num_slots - CONTEXT) // PAGE, self.regions, device=DEVICE).long() * PAGE
            self.req_to_token.copy_(starts.unsqueeze(1) + offsets)
        else:
            pages = torch.randint(0, num_slots // PAGE, (self.regions, CONTEXT // PAGE), device=DEVICE)
            self.req_to_token.copy_(pages.repeat_interleave(PAGE, 1) * PAGE + offsets % PAGE)
        if self.req_to_host is not None:
            self.req_to_host.copy_(self.req_to_token)

    def forget(self) -> None:
        self.owners.fill_(-1)
        self.lru_order.copy_(torch.arange(self.buffer, device=DEVICE))
        self.counters.zero_()

    def swap_in(self, steps: Steps, i: int) -> None:
        cuda_ops.swap_in(
            selected=steps.selected[i],
            seq_lens=steps.seq_lens,
            req_pool_indices=steps.req_pool_indices,
            num_real_reqs=steps.num_real_reqs,
            req_to_token=self.req_to_token,
            host_rows=self.host,
            hot_rows=self.hot,
            owners=self.owners,
            lru_order=self.lru_order,
            tail_start=self.tail_start,
            page_size=PAGE,
            out=steps.out,
            counters=self.counters,
        )

    def gather(self, steps: Steps, i: int) -> None:
        cuda_ops.gather(
            host_rows=self.host, slots=steps.missing_slots[i], workspace=self.hot, row_ids=steps.missing_targets
        )

    def misses_per_step(self, steps: Steps) -> int:
        """Misses of one step in the steady state, counted by the kernel over one more cycle."""
        self.counters.zero_()
        for i in range(steps.count):
            self.swap_in(steps, i)
        return int(self.counters[2]) // steps.count

    def check_rows(self, steps: Steps) -> None:
        """The last step's rows are the host's, for the first and the last request."""
        for b in (0, steps.selected.shape[1] - 1):
            positions = steps.selected[-1, b].long()
            slots = self.req_to_token[int(steps.req_pool_indices[b]), positions]
            hot = self.hot[steps.out[b].long()].cpu()
            assert torch.equal(hot, self.host[slots.long().cpu()]), f"wrong rows for request {b}"


class Steps:
    """The selections of one graph: a fixed share of resident positions, the others new in each step.

    A position that was new in one step returns a whole cycle later, when `count * misses` other rows have been
    loaded: more than the buffer holds beside the resident ones.
    """

    def __init__(self, cell: Cell, layer: Layer) -> None:
        new = round(TOP_K * cell.miss_percent / 100)
        resident = TOP_K - new
        self.count = 16 if new == 0 else (cell.buffer - resident + new - 1) // new + 2
        self.misses = new * cell.batch
        rows = slice(1, cell.batch + 1)
        positions = layer.positions[rows]
        is_new = torch.zeros(self.count, cell.batch, TOP_K, dtype=torch.bool, device=DEVICE)
        self.selected = torch.empty(self.count, cell.batch, TOP_K, dtype=torch.int32, device=DEVICE)
        slots = []
        for i in range(self.count):
            first = resident + i * new
            chosen = torch.cat((positions[:, :resident], positions[:, first : first + new]), 1)
            shuffle = torch.rand(chosen.shape, device=DEVICE).argsort(1)
            self.selected[i] = chosen.gather(1, shuffle)
            is_new[i] = shuffle >= resident
            if new:
                in_order = layer.req_to_token[rows].gather(1, self.selected[i].long())
                slots.append(in_order[is_new[i]].contiguous())
        self.missing_slots = slots
        region_starts = torch.arange(1, cell.batch + 1, device=DEVICE) * layer.region_rows
        self.missing_targets = (region_starts.unsqueeze(1) + torch.arange(new, device=DEVICE)).flatten().int()
        self.seq_lens = torch.full((cell.batch,), CONTEXT, dtype=torch.int64, device=DEVICE)
        self.req_pool_indices = torch.arange(1, cell.batch + 1, dtype=torch.int64, device=DEVICE)
        self.num_real_reqs = torch.tensor([cell.batch], dtype=torch.int32, device=DEVICE)
        self.out = torch.empty(cell.batch, TOP_K, dtype=torch.int32, device=DEVICE)
