"""Random histories of the coordinator alone: every row against a dense store, every region against a slow LRU model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_scheduler import BUFFER, LAYERS, MAX_CONTEXT, PAGE_SIZE, REGIONS, SELECTORS, TOP_K, FakeScheduler
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import hisparse_kernel
from hisparse.coordinator import POISON

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "mutation" / "faults")]
from hisparse_faults import FAULTS  # noqa: E402

from fuzz import fuzz  # noqa: E402

regions = st.integers(1, REGIONS - 1)
selectors = st.sampled_from(SELECTORS)
new_tokens = st.sampled_from((1, 2, PAGE_SIZE, TOP_K, BUFFER, BUFFER + PAGE_SIZE, 3 * BUFFER)).flatmap(
    lambda edge: st.integers(max(1, edge - 1), edge + 1)
)
batches = st.lists(regions, min_size=1, max_size=REGIONS - 1, unique=True)


class LruModel:
    """What one region holds in one layer: positions from least to most recently used, None = an empty row."""

    def __init__(self) -> None:
        self.order: list[int | None] = [None] * BUFFER

    def seed(self, candidates: Sequence[int]) -> None:
        held = list(dict.fromkeys(p for p in candidates if p >= 0))[:BUFFER]
        self.order = [None] * (BUFFER - len(held)) + list(reversed(held))

    def use(self, selected: Sequence[int], seq_len: int, tail_start: int) -> None:
        wanted = dict.fromkeys(
            p for p in selected if 0 <= p < seq_len and not (p >= tail_start and p >= seq_len - PAGE_SIZE)
        )
        hits = [p for p in self.order if p is not None and p in wanted]
        rest = [p for p in self.order if p is None or p not in wanted]
        missing = [p for p in wanted if p not in hits]
        self.order = rest[len(missing) :] + missing + hits


class ModelledScheduler(FakeScheduler):
    """Frees slots the hard way (poisoned at once, reused soon), and keeps the LRU model beside the coordinator."""

    def __init__(self) -> None:
        super().__init__(debug=True)
        self.models = {(layer, region): LruModel() for layer in range(len(LAYERS)) for region in range(REGIONS)}
        self.tail_start = [0] * REGIONS
        seed_regions = self.coordinator.seed_regions

        def seed_both(layer_id: int, group: Any, workspace: torch.Tensor, selected: torch.Tensor) -> None:
            seed_regions(layer_id, group, workspace, selected)
            for region, last in zip(group.regions.tolist(), group.last_tokens.tolist(), strict=True):
                candidates = [p for token in last for p in selected[token].tolist()]
                self.models[layer_id - LAYERS.start, region].seed(candidates)

        self.coordinator.seed_regions = seed_both  # type: ignore[method-assign]

    def extend(self, batch: dict[int, int], *args: Any, **kwargs: Any) -> int:
        groups = super().extend(batch, *args, **kwargs)
        for region in batch:
            self.tail_start[region] = self.seq_lens[region]
        return groups

    def select(self, layer_id: int, regions: list[int], selected: list[list[int]], padding: int = 0) -> None:
        super().select(layer_id, regions, selected, padding)
        for region, positions in zip(regions, selected, strict=True):
            model = self.models[layer_id - LAYERS.start, region]
            model.use(positions, self.seq_lens[region], self.tail_start[region])

    def finish(self, region: int) -> None:
        super().finish(region)
        self.coordinator.host_pool.rows[:, torch.tensor(self._free)] = POISON

    def exchange_slots(self, source: int, target: int) -> int:
        """The radix tree keeps one copy of a prefix that both computed; its slots are freed."""
        same = (self.dense[:, source] == self.dense[:, target]).all(-1).all(0)
        length = min(self.seq_lens[source], self.seq_lens[target])
        length = int(same[:length].long().cumprod(0).sum()) // PAGE_SIZE * PAGE_SIZE
        old = self.req_to_token[target, :length].tolist()
        new = self.req_to_token[source, :length].tolist()
        self._users.update(new)
        self.req_to_token[target, :length] = self.req_to_token[source, :length]
        for slot in old:
            self._users[slot] -= 1
            if self._users[slot] == 0:
                self._free.append(slot)
                self.coordinator.host_pool.rows[:, slot] = POISON
        return length

    def copy_of(self, source: int, target: int, length: int) -> None:
        """A second request computes the same rows into slots of its own."""
        slots = torch.tensor(self._allocate(target, length))
        self.dense[:, target, :length] = self.dense[:, source, :length]
        self.coordinator.host_pool.rows[:, slots] = self.dense[:, source, :length]

    def residents(self, layer: int, region: int) -> list[int | None]:
        hot = self.coordinator.hot_buffer
        owners = hot.owners[layer, region][hot.lru_order[layer, region].long()]
        return [p if p >= 0 else None for p in owners.tolist()]


class Coordinator(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = ModelledScheduler()

    @rule(batch=st.dictionaries(regions, new_tokens, min_size=1), selector=selectors, padding=st.integers(0, 3))
    def extend(self, batch: dict[int, int], selector: Any, padding: int) -> None:
        """First prefills and chunks; a region that was decoding starts over with what it has as its prefix."""
        lens = self.scheduler.seq_lens
        batch = {region: new for region, new in batch.items() if lens[region] + new <= MAX_CONTEXT}
        if batch:
            self.scheduler.extend(batch, selector, padding)

    @rule(batch=batches, selector=selectors, steps=st.integers(1, 2 * PAGE_SIZE), padding=st.integers(0, 2))
    def decode(self, batch: list[int], selector: Any, steps: int, padding: int) -> None:
        for _ in range(steps):
            batch = [region for region in batch if 0 < self.scheduler.seq_lens[region] < MAX_CONTEXT]
            if batch:
                self.scheduler.decode(batch, selector, min(padding, REGIONS - len(batch)))

    @rule(region=regions)
    def finish(self, region: int) -> None:
        self.scheduler.finish(region)

    @rule(source=regions, region=regions, share=st.floats(0, 1), new=new_tokens, selector=selectors)
    def start_with_a_prefix(self, source: int, region: int, share: float, new: int, selector: Any) -> None:
        if source == region:
            return
        self.scheduler.finish(region)
        length = min(int(self.scheduler.seq_lens[source] * share), MAX_CONTEXT - new)
        self.scheduler.share_prefix(source, region, length)
        self.scheduler.extend({region: new}, selector)

    @rule(source=regions, region=regions, new=new_tokens, selector=selectors)
    def insert_the_same_prefix(self, source: int, region: int, new: int, selector: Any) -> None:
        """Both hold rows of their own for it; then the region's slots are exchanged for the source's."""
        length = min(self.scheduler.seq_lens[source], MAX_CONTEXT - new)
        if source == region or length == 0:
            return
        self.scheduler.finish(region)
        self.scheduler.copy_of(source, region, length)
        self.scheduler.extend({region: new}, selector)
        assert self.scheduler.exchange_slots(source, region) >= length // PAGE_SIZE * PAGE_SIZE

    @rule(region=regions, other=regions, selector=selectors)
    def retract_and_restart(self, region: int, other: int, selector: Any) -> None:
        """All rows are computed anew, elsewhere."""
        length = self.scheduler.seq_lens[region]
        if length == 0:
            return
        self.scheduler.finish(region)
        self.scheduler.finish(other)
        self.scheduler.extend({other: length}, selector)

    @invariant()
    def residency_is_the_models(self) -> None:
        for (layer, region), model in self.scheduler.models.items():
            if self.scheduler.seq_lens[region]:
                assert self.scheduler.residents(layer, region) == model.order, (layer, region)

    def teardown(self) -> None:
        self.scheduler.coordinator.check()
        statistics = self.scheduler.coordinator.statistics()
        assert statistics["selected_positions"] == self.scheduler.selected_positions


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_random_histories() -> None:
    fuzz(Coordinator, seconds=30, examples=20, steps=20)


@pytest.mark.parametrize("fault", FAULTS)
def test_random_histories_find_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first few dozen histories do."""
    target, broken = FAULTS[fault]
    healthy = getattr(hisparse_kernel, target)
    monkeypatch.setattr(hisparse_kernel, target, lambda **arguments: broken(healthy, arguments))
    monkeypatch.delenv("HISPARSE_FUZZ_SECONDS", raising=False)
    with pytest.raises(AssertionError):
        fuzz(Coordinator, seconds=0, examples=60, steps=20, shrink=False)
