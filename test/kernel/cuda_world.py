"""What the CUDA swap-in tests share: a state that lives twice, once for the kernels and once for the reference.

Every buffer the kernels write lies between guard bytes, and outputs are poisoned before each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hisparse_kernel import cuda_ops, reference

DEVICE = "cuda"
GUARD_BYTES = 4096
GUARD = 0xA5
POISON = -123_456


@dataclass(frozen=True)
class Shape:
    """One configuration of swap_in; `num_real` of `batch` rows are real."""

    batch: int
    num_lru_rows: int
    top_k: int
    page_size: int = 64
    row_bytes: int = 1152
    max_context: int = 1000
    num_slots: int = 5000
    num_real: int | None = None
    host_stride_bytes: int | None = None
    lens_dtype: torch.dtype = torch.int64
    ids_dtype: torch.dtype = torch.int64
    bad_slots: float = 0.0

    @property
    def regions(self) -> int:
        return self.batch + 2

    @property
    def real(self) -> int:
        return self.batch if self.num_real is None else self.num_real


class Guarded:
    """A tensor between guard bytes."""

    def __init__(self, value: torch.Tensor) -> None:
        num_bytes = value.numel() * value.element_size()
        self._whole = torch.full((num_bytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=value.device)
        inside = self._whole[GUARD_BYTES : GUARD_BYTES + num_bytes]
        self.tensor = inside.view(value.dtype).view(value.shape)
        self.tensor.copy_(value)

    def intact(self) -> torch.Tensor:
        return (self._whole[:GUARD_BYTES] == GUARD).all() & (self._whole[-GUARD_BYTES:] == GUARD).all()


def host_rows(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Random pinned rows [slots, row_bytes], rows `host_stride_bytes` apart."""
    stride = shape.host_stride_bytes or shape.row_bytes
    rows = torch.randint(0, 256, (shape.num_slots, stride), dtype=torch.uint8, generator=generator)
    return rows.pin_memory()[:, : shape.row_bytes]


class World:
    """The state of one layer, twice; `step` runs both sides and compares all of it."""

    STATE = ("hot_rows", "owners", "lru_order", "counters")

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        cpu = torch.Generator().manual_seed(seed)
        self.random = torch.Generator(DEVICE).manual_seed(seed)
        regions, n = shape.regions, shape.num_lru_rows
        self.host = host_rows(shape, cpu)
        self.req_to_token = torch.randint(0, shape.num_slots, (regions, shape.max_context), generator=cpu).int().cuda()
        if shape.bad_slots:
            bad = torch.rand(self.req_to_token.shape, generator=cpu).cuda() < shape.bad_slots
            wrong = torch.where(torch.rand(bad.shape, generator=cpu).cuda() < 0.5, -1, shape.num_slots)
            self.req_to_token = torch.where(bad, wrong, self.req_to_token).int()
        self.req_pool_indices = (torch.randperm(regions - 1, generator=cpu)[: shape.batch] + 1).to(shape.ids_dtype)
        self.req_pool_indices = self.req_pool_indices.cuda()
        self.num_real_reqs = torch.tensor([shape.real], dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.full((shape.batch,), shape.max_context, dtype=shape.lens_dtype, device=DEVICE)
        self.tail_start = torch.full((regions,), max(0, shape.max_context - 3), dtype=torch.int32, device=DEVICE)
        state = {
            "hot_rows": torch.zeros(regions * (n + shape.page_size), shape.row_bytes, dtype=torch.uint8),
            "owners": torch.full((regions, n), -1, dtype=torch.int32),
            "lru_order": torch.stack([torch.randperm(n, generator=cpu) for _ in range(regions)]).short(),
            "counters": torch.zeros(3, dtype=torch.int64),
        }
        self.mine = {name: Guarded(value.cuda()) for name, value in state.items()}
        self.theirs = {name: value.cuda() for name, value in state.items()}
        self.out = Guarded(torch.zeros(shape.batch, shape.top_k, dtype=torch.int32, device=DEVICE))
        self.expected = torch.zeros_like(self.out.tensor)

    def arguments(self, selected: torch.Tensor) -> dict:
        return {
            "selected": selected,
            "seq_lens": self.seq_lens,
            "req_pool_indices": self.req_pool_indices,
            "num_real_reqs": self.num_real_reqs,
            "req_to_token": self.req_to_token,
            "host_rows": self.host,
            "tail_start": self.tail_start,
            "page_size": self.shape.page_size,
        }

    def run_mine(self, selected: torch.Tensor) -> torch.Tensor:
        self.out.tensor.fill_(POISON)
        state = {name: guarded.tensor for name, guarded in self.mine.items()}
        return cuda_ops.swap_in(**self.arguments(selected), **state, out=self.out.tensor)

    def run_reference(self, selected: torch.Tensor) -> torch.Tensor:
        self.expected.fill_(POISON)
        return reference.swap_in(**self.arguments(selected), **self.theirs, out=self.expected)

    def step(self, selected: torch.Tensor) -> None:
        self.run_mine(selected)
        self.run_reference(selected)
        self.check()

    def check(self) -> None:
        same = {"out": torch.equal(self.out.tensor, self.expected), "guard of out": bool(self.out.intact())}
        for name in self.STATE:
            same[name] = torch.equal(self.mine[name].tensor, self.theirs[name])
            same["guard of " + name] = bool(self.mine[name].intact())
        assert all(same.values()), {name: ok for name, ok in same.items() if not ok}

    def draw(self, hits: float = 0.6, repeats: float = 0.0, none: float = 0.05, tail: float = 0.02) -> torch.Tensor:
        """A selection [batch, top_k]: resident positions with probability `hits`, the others anywhere in
        [-2, max_context + 2); `repeats` of the entries repeat another one of their row."""
        shape, size = self.shape, (self.shape.batch, self.shape.top_k)
        anywhere = self._randint(-2, shape.max_context + 2, size)
        lru_row = self._randint(0, shape.num_lru_rows, size)
        resident = self.mine["owners"].tensor[self.req_pool_indices.long()].gather(1, lru_row).long()
        chosen = torch.where(self._chance(hits, size) & (resident >= 0), resident, anywhere)
        newest = self.seq_lens.long().unsqueeze(1) - 1 - self._randint(0, shape.page_size + 2, size)
        chosen = torch.where(self._chance(tail, size), newest, chosen)
        chosen = torch.where(self._chance(none, size), -1, chosen)
        if repeats:
            other = chosen.gather(1, self._randint(0, shape.top_k, size))
            chosen = torch.where(self._chance(repeats, size), other, chosen)
        else:
            chosen = self._distinct(chosen)
        return chosen.int()

    def move_on(self) -> None:
        """Other lengths and tails, as if some requests had grown or been replaced."""
        shape = self.shape
        self.seq_lens.copy_(self._randint(1, shape.max_context + 1, (shape.batch,)))
        self.tail_start.copy_(self._randint(0, shape.max_context + 1, (shape.regions,)))

    def _distinct(self, chosen: torch.Tensor) -> torch.Tensor:
        """-1 for every entry whose position an earlier entry has."""
        order = torch.argsort(chosen, dim=1, stable=True)
        in_order = chosen.gather(1, order)
        again = torch.zeros_like(in_order, dtype=torch.bool)
        again[:, 1:] = in_order[:, 1:] == in_order[:, :-1]
        return torch.where(torch.zeros_like(again).scatter_(1, order, again), -1, chosen)

    def _chance(self, probability: float, size: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(size, generator=self.random, device=DEVICE) < probability

    def _randint(self, low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, size, generator=self.random, device=DEVICE)


def with_padding(shape: Shape) -> Shape:
    return replace(shape, num_real=(shape.batch + 1) // 2)
