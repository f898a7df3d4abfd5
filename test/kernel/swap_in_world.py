"""A small world for swap-in: requests that start, decode and restart, and a dense copy of every row they ever wrote.

`World` keeps the tensors of one layer and drives the data plane it is given; `worlds` and `events` draw its shape and
history. What must hold afterwards is the tests' business.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from hisparse.row_format import Bf16Row

ROW_FORMAT = Bf16Row(nope_dim=6, rope_dim=2)
ROW_BYTES = 16
GUARD_ROWS = 3
GUARD = 0xA5
POISON = 0xFF
MAX_CONTEXT = 24
HOST_SLOTS = 5 * MAX_CONTEXT
BAD_SLOTS = (-1, -7, -(2**31), HOST_SLOTS, HOST_SLOTS + 1, 2**31 - 1)


@dataclass(frozen=True)
class Shape:
    """What stays the same in one world: `regions` includes region 0, which no request has."""

    top_k: int
    device_buffer_size: int
    page_size: int
    regions: int
    index_dtype: torch.dtype
    seed: int

    @property
    def region_rows(self) -> int:
        return self.device_buffer_size + self.page_size


@dataclass
class Step:
    """One swap-in call: its inputs, the state before it, and what it returned."""

    regions: list[int]
    seq_lens: list[int]
    selected: list[list[int]]
    padding: int
    before: dict[str, torch.Tensor]
    out: torch.Tensor
    counted: list[int] = field(default_factory=list)


class World:
    """The tensors of one layer; `kernel` is a module with the data plane's functions."""

    def __init__(self, shape: Shape, kernel: Any) -> None:
        self.shape, self.kernel = shape, kernel
        self.random = random.Random(shape.seed)
        guarded_rows = shape.regions * shape.region_rows + 2 * GUARD_ROWS
        self._guarded = torch.full((guarded_rows, ROW_BYTES), GUARD, dtype=torch.uint8)
        self.hot_rows = self._guarded[GUARD_ROWS:-GUARD_ROWS]
        self.hot_rows.fill_(POISON)
        self.host_rows = torch.full((HOST_SLOTS, ROW_BYTES), POISON, dtype=torch.uint8)
        state = (1, shape.regions, shape.device_buffer_size)
        self.owners = torch.full(state, -1, dtype=torch.int32)
        self.lru_order = torch.zeros(state, dtype=torch.int16)
        self.tail_start = torch.zeros(shape.regions, dtype=torch.int32)
        self.req_to_token = torch.full((shape.regions, MAX_CONTEXT), -1, dtype=torch.int32)
        self.counters = torch.tensor([self.random.randrange(100) for _ in range(3)])
        self.seq_lens = [0] * shape.regions
        self.rows: dict[tuple[int, int], torch.Tensor] = {}  # (region, position) -> bytes, the dense oracle
        slots = list(range(HOST_SLOTS))
        self.random.shuffle(slots)
        self._slots = [slots[MAX_CONTEXT * r : MAX_CONTEXT * (r + 1)] for r in range(shape.regions)]
        self._next_row = 0
        for region in range(shape.regions):
            self.start(region, 0, [])

    # ---- events

    def start(self, region: int, prompt_len: int, candidates: list[int]) -> None:
        """A new request in a region (the old one is gone): its prompt is in the host pool, its region reset, seeded."""
        for position in range(MAX_CONTEXT):
            self.rows.pop((region, position), None)
        self.random.shuffle(self._slots[region])
        slots = torch.tensor(self._slots[region])
        self.req_to_token[region] = slots.int()
        self.host_rows[slots] = POISON
        prompt = ROW_FORMAT.pack(*self._new_token(prompt_len))
        self.host_rows[slots[:prompt_len]] = prompt
        self.rows.update({(region, position): row for position, row in enumerate(prompt)})
        self.seq_lens[region] = prompt_len
        self.kernel.reset(
            owners=self.owners,
            lru_order=self.lru_order,
            tail_start=self.tail_start,
            regions=self._ints([region]),
            seq_lens=self._ints([prompt_len]),
        )
        self._region(region).fill_(POISON)
        if candidates:
            workspace = torch.full((4 + prompt_len, ROW_BYTES), POISON, dtype=torch.uint8)
            workspace[4:] = prompt
            self.kernel.seed(
                candidates=torch.tensor([candidates], dtype=torch.int32),
                regions=self._ints([region]),
                workspace_starts=self._ints([4]),
                workspace=workspace,
                hot_rows=self.hot_rows,
                owners=self.owners[0],
                lru_order=self.lru_order[0],
                page_size=self.shape.page_size,
            )

    def spoil(self, region: int, position: int, slot: int) -> None:
        """Lose the host row of a position: its slot lies outside the pool from now on."""
        self.req_to_token[region, position] = slot

    def grow(self, regions: list[int], padding: int) -> None:
        """One new token for each of the requests, written through."""
        k_nope, k_rope = self._new_token(len(regions) + padding)
        for region in regions:
            self.seq_lens[region] += 1
        slots = [int(self.req_to_token[region, self.seq_lens[region] - 1]) for region in regions]
        self.kernel.store_decode(
            k_nope=k_nope,
            k_rope=k_rope,
            slots=self._ints(slots + [0] * padding),
            host_rows=self.host_rows,
            hot_rows=self.hot_rows,
            device_buffer_size=self.shape.device_buffer_size,
            page_size=self.shape.page_size,
            row_format=ROW_FORMAT,
            **self._batch(regions, padding),
        )
        for region, row in zip(regions, ROW_FORMAT.pack(k_nope, k_rope), strict=False):
            self.rows[region, self.seq_lens[region] - 1] = row

    def swap_in(self, regions: list[int], selected: list[list[int]], padding: int) -> Step:
        """`selected` has a row for each request and each row of padding."""
        step = Step(regions, [self.seq_lens[r] for r in regions], selected, padding, self.snapshot(), torch.empty(0))
        rows = torch.tensor(selected, dtype=torch.int32).reshape(-1, self.shape.top_k)
        out = torch.full_like(rows, 12_345)  # rows of an earlier step, none of which may survive
        step.out = self.kernel.swap_in(
            selected=rows,
            req_to_token=self.req_to_token,
            host_rows=self.host_rows,
            hot_rows=self.hot_rows,
            owners=self.owners[0],
            lru_order=self.lru_order[0],
            tail_start=self.tail_start,
            page_size=self.shape.page_size,
            out=out,
            counters=self.counters,
            **self._batch(regions, padding),
        )
        assert step.out is out
        assert rows.tolist() == selected, "swap-in changed its input"
        step.counted = (self.counters - step.before["counters"]).tolist()
        return step

    # ---- questions

    def snapshot(self) -> dict[str, torch.Tensor]:
        names = ("hot_rows", "host_rows", "owners", "lru_order", "tail_start", "req_to_token", "counters")
        return {name: getattr(self, name).clone() for name in names}

    def has_host_row(self, region: int, position: int) -> bool:
        return 0 <= int(self.req_to_token[region, position]) < HOST_SLOTS

    def in_tail(self, region: int, position: int) -> bool:
        """Written to the tail ring, and not overwritten yet."""
        newest = self.seq_lens[region] - 1
        return position >= int(self.tail_start[region]) and newest - position < self.shape.page_size

    def guards_are_intact(self) -> bool:
        guards = torch.cat((self._guarded[:GUARD_ROWS], self._guarded[-GUARD_ROWS:]))
        return bool((guards == GUARD).all())

    # ---- details

    def _region(self, region: int) -> torch.Tensor:
        return self.hot_rows[region * self.shape.region_rows : (region + 1) * self.shape.region_rows]

    def _new_token(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows unlike any other row of this world, as bf16 parts."""
        numbers = torch.arange(self._next_row, self._next_row + count, dtype=torch.int16).unsqueeze(1)
        self._next_row += count
        values = (numbers + torch.arange(8, dtype=torch.int16) * 1000).view(torch.bfloat16)
        return values[:, :6], values[:, 6:]

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=self.shape.index_dtype)

    def _batch(self, regions: list[int], padding: int) -> dict[str, torch.Tensor]:
        """Padding rows look like SGLang's: request 0, length 1."""
        return {
            "seq_lens": self._ints([self.seq_lens[r] for r in regions] + [1] * padding),
            "req_pool_indices": self._ints(regions + [0] * padding),
            "num_real_reqs": torch.tensor([len(regions)], dtype=torch.int32),
        }


# ---- random histories: hypothesis draws the shape, a seed and the length; the seed decides the rest, which is faster


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    device_buffer_size = draw(st.integers(1, 8))
    return Shape(
        top_k=draw(st.one_of(st.just(device_buffer_size), st.integers(1, device_buffer_size))),
        device_buffer_size=device_buffer_size,
        page_size=draw(st.integers(1, 4)),
        regions=draw(st.integers(2, 5)),
        index_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def random_start(rng: random.Random, shape: Shape) -> tuple[int, list[int]]:
    """Prompt length and seed candidates of a new request."""
    prompt_len = rng.randrange(MAX_CONTEXT - 3)
    return prompt_len, [rng.randrange(-1, prompt_len) for _ in range(rng.choice((0, 2, 12)))] if prompt_len else []


def random_selection(rng: random.Random, shape: Shape, seq_len: int) -> list[int]:
    """Positions of one request; some repeated, negative, or past the end."""
    hostile = (-1, -2, -(2**31), seq_len, seq_len + 1, 2**31 - 1)
    first = rng.choice((0, 0, seq_len - 6))
    return [
        rng.choice(hostile) if rng.random() < 0.2 else rng.randint(min(first, seq_len), seq_len)
        for _ in range(shape.top_k)
    ]
