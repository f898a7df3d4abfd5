"""What SGLang does around the coordinator, in miniature: slots, requests, batches; and a dense store of every row.

Every swapped-in or prefilled row is compared, bit for bit, with the dense store.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from hisparse.config import ResolvedConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.memory import HostPool, HotBuffer
from hisparse.row_format import Bf16Row, RowFormat

TOP_K = 8
BUFFER = 16
PAGE_SIZE = 4
WORKSPACE = 320
MAX_CONTEXT = 316
REGIONS = 6
HOST_SLOTS = 1600
LAYERS = range(30, 34)

Selector = Callable[[random.Random, int], list[int]]
"""TOP_K positions, some of which may be -1, for a sequence length."""


def newest(rng: random.Random, seq_len: int) -> list[int]:
    return [seq_len - 1 - i if i < seq_len else -1 for i in range(TOP_K)]


def anywhere(rng: random.Random, seq_len: int) -> list[int]:
    return _padded(rng.sample(range(seq_len), min(TOP_K, seq_len)))


def hostile(rng: random.Random, seq_len: int) -> list[int]:
    return [rng.choice((-1, -5, seq_len, seq_len + 3, rng.randrange(seq_len), seq_len - 1)) for _ in range(TOP_K)]


def sweeping(rng: random.Random, seq_len: int) -> list[int]:
    """Walks over the whole sequence, so that every row is evicted and comes back."""
    return _padded([(seq_len * 5 + 3 * i) % seq_len for i in range(min(TOP_K, seq_len))])


def beginning(rng: random.Random, seq_len: int) -> list[int]:
    return _padded(list(range(min(TOP_K, seq_len))))


SELECTORS: tuple[Selector, ...] = (newest, anywhere, hostile, sweeping, beginning)


def _padded(positions: Sequence[int]) -> list[int]:
    distinct = list(dict.fromkeys(positions))
    return distinct + [-1] * (TOP_K - len(distinct))


class FakeScheduler:
    """A request is its region; `seq_lens[region]` tokens of it have rows."""

    def __init__(self, *, debug: bool, row_format: RowFormat | None = None, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.row_format = row_format or Bf16Row(nope_dim=24, rope_dim=8)
        row_bytes = self.row_format.row_bytes
        config = ResolvedConfig(TOP_K, BUFFER, PAGE_SIZE, WORKSPACE, None, None)
        self.req_to_token = torch.full((REGIONS, MAX_CONTEXT), -1, dtype=torch.int32)
        self.coordinator = HiSparseCoordinator(
            config=config,
            row_format=self.row_format,
            host_pool=HostPool(layers=len(LAYERS), slots=HOST_SLOTS, row_bytes=row_bytes, pin=False),
            hot_buffer=HotBuffer.allocate(
                layers=len(LAYERS),
                regions=REGIONS,
                device_buffer_size=BUFFER,
                page_size=PAGE_SIZE,
                row_bytes=row_bytes,
                device="cpu",
            ),
            workspace=torch.zeros((1, WORKSPACE, row_bytes), dtype=torch.uint8),
            req_to_token=self.req_to_token,
            start_layer=LAYERS.start,
            max_batch=REGIONS,
            debug=debug,
        )
        self.seq_lens = [0] * REGIONS
        self.dense = torch.zeros((len(LAYERS), REGIONS, MAX_CONTEXT, row_bytes), dtype=torch.uint8)
        self.selected_positions = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._free = list(range(PAGE_SIZE, HOST_SLOTS))  # the first page is SGLang's padding
        self.rng.shuffle(self._free)
        self._users: Counter[int] = Counter()

    # ---- requests

    def share_prefix(self, source: int, target: int, prefix_len: int) -> None:
        """The radix tree gives a new request the slots of another's first tokens."""
        assert self.seq_lens[target] == 0 and prefix_len <= self.seq_lens[source]
        self.req_to_token[target, :prefix_len] = self.req_to_token[source, :prefix_len]
        self.dense[:, target, :prefix_len] = self.dense[:, source, :prefix_len]
        self._users.update(self.req_to_token[target, :prefix_len].tolist())
        self.seq_lens[target] = prefix_len

    def finish(self, region: int) -> None:
        """Finished, aborted or retracted: its slots are free, nobody tells the coordinator."""
        for slot in self.req_to_token[region, : self.seq_lens[region]].tolist():
            self._users[slot] -= 1
            if self._users[slot] == 0:
                self._free.append(slot)
        self.rng.shuffle(self._free)
        self.req_to_token[region] = -1
        self.seq_lens[region] = 0

    def extend(self, batch: dict[int, int], selector: Selector = anywhere, padding: int = 0) -> int:
        """Prefill: region -> new tokens. Returns the number of groups it took."""
        regions = list(batch)
        prefix_lens = [self.seq_lens[region] for region in regions]
        slots = [slot for region, new in batch.items() for slot in self._allocate(region, new)]
        groups = self.coordinator.begin_extend(
            req_pool_indices=torch.tensor(regions),
            prefix_lens=prefix_lens,
            extend_lens=list(batch.values()),
            out_cache_loc=torch.tensor(slots + [0] * padding),
        )
        owners = [(region, p) for region, new in batch.items() for p in self._newest_positions(region, new)]
        for layer_id in LAYERS:
            k_nope, k_rope = self._new_rows(layer_id, owners, padding)
            selected = [selector(self.rng, position + 1) for _, position in owners]
            selected_in_range = [
                [p if p <= last else -1 for p in row] for row, (_, last) in zip(selected, owners, strict=True)
            ]
            rows = torch.tensor(selected_in_range, dtype=torch.int32)
            for group in groups:
                workspace = self.coordinator.fill_workspace(layer_id, group, k_nope, k_rope)
                self._compare_workspace(layer_id, workspace, group.regions.tolist(), group.starts.tolist())
                self.coordinator.seed_regions(layer_id, group, workspace, rows[group.tokens])
        return len(groups)

    def decode(self, regions: list[int], selector: Selector, padding: int = 0) -> None:
        """One step of a batch: a new token each, in every layer."""
        slots = [slot for region in regions for slot in self._allocate(region, 1)]
        owners = [(region, self.seq_lens[region] - 1) for region in regions]
        for layer_id in LAYERS:
            k_nope, k_rope = self._new_rows(layer_id, owners, padding)
            self.coordinator.num_real_reqs.fill_(len(regions))
            self.coordinator.store_decode(
                layer_id,
                k_nope=k_nope,
                k_rope=k_rope,
                slots=torch.tensor(slots + [0] * padding),
                **self._batch(regions, padding),
            )
            self.select(layer_id, regions, [selector(self.rng, position + 1) for _, position in owners], padding)

    def select(self, layer_id: int, regions: list[int], selected: list[list[int]], padding: int = 0) -> None:
        """Swap in, and compare every row that was asked for."""
        rows = torch.tensor(selected + [[0] * TOP_K] * padding, dtype=torch.int32)
        self.coordinator.num_real_reqs.fill_(len(regions))
        row_ids = self.coordinator.swap_in_selected_pages(
            **self._batch(regions, padding), selected=rows, layer_id=layer_id
        )
        assert row_ids.shape == rows.shape
        assert bool((row_ids[len(regions) :] == -1).all())
        layer = layer_id - LAYERS.start
        hot_rows = self.coordinator.hot_buffer.rows[layer]
        for region, positions, ids in zip(regions, rows, row_ids, strict=False):
            valid = (positions >= 0) & (positions < self.seq_lens[region])
            assert torch.equal(ids >= 0, valid)
            wanted = self.dense[layer, region, positions[valid].long()]
            assert torch.equal(hot_rows[ids[valid].long()], wanted), f"layer {layer_id}, region {region}"
            self.selected_positions += int(valid.sum())

    # ---- details

    def _allocate(self, region: int, count: int) -> list[int]:
        first = self.seq_lens[region]
        slots = [self._free.pop() for _ in range(count)]
        self._users.update(slots)
        self.req_to_token[region, first : first + count] = torch.tensor(slots, dtype=torch.int32)
        self.seq_lens[region] += count
        return slots

    def _newest_positions(self, region: int, count: int) -> range:
        return range(self.seq_lens[region] - count, self.seq_lens[region])

    def _new_rows(
        self, layer_id: int, owners: list[tuple[int, int]], padding: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Random KV of new tokens, [tokens, 1, dim] like SGLang's; noted in the dense store at (region, position)."""
        dims = self.row_format.nope_dim, self.row_format.rope_dim
        k = torch.randn((len(owners) + padding, 1, sum(dims)), generator=self._generator).bfloat16()
        k_nope, k_rope = k.split(dims, dim=-1)
        region, position = torch.tensor(owners).unbind(-1)
        self.dense[layer_id - LAYERS.start, region, position] = self.row_format.pack(k_nope, k_rope)[: len(owners)]
        return k_nope, k_rope

    def _batch(self, regions: list[int], padding: int) -> dict[str, torch.Tensor]:
        return {
            "req_pool_indices": torch.tensor(regions + [0] * padding),
            "seq_lens": torch.tensor([self.seq_lens[region] for region in regions] + [1] * padding),
        }

    def _compare_workspace(self, layer_id: int, workspace: torch.Tensor, regions: list[int], starts: list[int]) -> None:
        for region, start in zip(regions, starts, strict=True):
            length = self.seq_lens[region]
            wanted = self.dense[layer_id - LAYERS.start, region, :length]
            assert torch.equal(workspace[start : start + length], wanted), f"layer {layer_id}, region {region}"
