"""The coordinator alone, through everything SGLang's scheduler does to it; rows are compared with a dense store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_scheduler
import pytest
import torch
from fake_scheduler import (
    BUFFER,
    LAYERS,
    PAGE_SIZE,
    SELECTORS,
    TOP_K,
    FakeScheduler,
    Selector,
    anywhere,
    beginning,
    hostile,
    newest,
    sweeping,
)

import hisparse.coordinator
from hisparse.coordinator import POISON, SEED_QUERIES, HiSparseCoordinator
from hisparse.memory import HostPool, HotBuffer
from hisparse.row_format import Fp8DsMlaRow
from hisparse.side_stream import SideStream
from hisparse.workspace import Workspace

LAYER = LAYERS.start + 1


@pytest.fixture(params=(False, True), ids=("plain", "debug"))
def scheduler(request: pytest.FixtureRequest) -> Iterator[FakeScheduler]:
    """Checks the conservation laws and the totals after every scenario."""
    scheduler = FakeScheduler(debug=request.param)
    yield scheduler
    scheduler.coordinator.check()
    statistics = scheduler.coordinator.statistics()
    assert statistics["selected_positions"] == scheduler.selected_positions
    row_bytes = scheduler.row_format.row_bytes
    assert statistics["swapped_in_bytes"] == statistics["missed_positions"] * row_bytes


@pytest.fixture
def debugged() -> FakeScheduler:
    """Two requests that have decoded for a while, in debug mode."""
    scheduler = FakeScheduler(debug=True)
    scheduler.extend({2: 40, 3: 50})
    for _ in range(8):
        scheduler.decode([2, 3], anywhere)
    return scheduler


# ---- scenarios


@pytest.mark.parametrize("prompt_len", (1, PAGE_SIZE, TOP_K, BUFFER - 1, BUFFER, BUFFER + 1, 10 * BUFFER))
def test_a_prompt_of_any_length_then_decode(scheduler: FakeScheduler, prompt_len: int) -> None:
    assert scheduler.extend({1: prompt_len}) == 1
    for step in range(2 * PAGE_SIZE + 2):
        scheduler.decode([1], SELECTORS[step % len(SELECTORS)])


def test_decode_far_past_the_tail_ring_and_eviction(scheduler: FakeScheduler) -> None:
    """Generated rows leave the ring, are evicted and come back, for every kind of selection."""
    scheduler.extend({1: 5, 4: 90, 2: 17})
    for step in range(120):
        scheduler.decode([4, 1, 2], SELECTORS[step // 4 % len(SELECTORS)], padding=step % 3)
    assert scheduler.coordinator.statistics()["missed_positions"] > 20 * BUFFER


def test_requests_come_and_go_while_others_decode(scheduler: FakeScheduler) -> None:
    scheduler.extend({1: 30})
    for step in range(60):
        if step == 10:
            scheduler.extend({2: 25, 5: 3})
        if step == 30:
            scheduler.finish(1)
        if step == 40:
            scheduler.extend({1: 50})
        running = [region for region in (5, 2, 1) if scheduler.seq_lens[region]]
        scheduler.decode(scheduler.rng.sample(running, len(running)), hostile if step % 2 else sweeping)


def test_chunked_prefill(scheduler: FakeScheduler) -> None:
    for new in (40, 1, 64, 37):
        scheduler.extend({3: new})
    for _ in range(20):
        scheduler.decode([3], sweeping)
    assert scheduler.coordinator.statistics()["prefix_tokens_gathered"] == 40 + 41 + 105


def test_another_request_decodes_between_chunks(scheduler: FakeScheduler) -> None:
    scheduler.extend({1: 20})
    for new in (40, 40, 40):
        scheduler.extend({2: new})
        for _ in range(6):
            scheduler.decode([1], sweeping)
    for _ in range(6):
        scheduler.decode([2, 1], sweeping)


def test_prefix_reuse_by_other_requests(scheduler: FakeScheduler) -> None:
    """The prefix holds prompt and generated rows of a request that is still running, then of one that is gone."""
    scheduler.extend({1: 60})
    for _ in range(30):
        scheduler.decode([1], anywhere)
    scheduler.share_prefix(1, 2, 80)
    scheduler.share_prefix(1, 3, 8)
    scheduler.extend({2: 1, 3: 40})
    for _ in range(20):
        scheduler.decode([3, 1, 2], sweeping)
    scheduler.finish(1)
    scheduler.share_prefix(2, 1, 90)
    scheduler.extend({1: 12, 4: 30})
    for _ in range(20):
        scheduler.decode([4, 1, 2, 3], sweeping)


def test_retraction_and_restart_in_another_region(scheduler: FakeScheduler) -> None:
    """Its slots go to somebody else at once; the restart computes all its rows anew, generated ones included."""
    scheduler.extend({1: 40, 2: 40})
    for _ in range(25):
        scheduler.decode([1, 2], sweeping)
    length = scheduler.seq_lens[2]
    scheduler.finish(2)
    scheduler.extend({5: 120})
    for _ in range(10):
        scheduler.decode([1, 5], sweeping)
    scheduler.extend({3: length})
    for _ in range(25):
        scheduler.decode([3, 5, 1], sweeping)


@pytest.mark.parametrize("selector", (newest, beginning, sweeping))
def test_a_new_request_in_a_used_region_sees_nothing_of_the_old_one(
    scheduler: FakeScheduler, selector: Selector
) -> None:
    """Same region, same positions, other rows, and nothing seeded over what the old one left."""
    scheduler.extend({1: 100})
    for prompt_len in (100, 12, 1, 90):
        for _ in range(2 * PAGE_SIZE):
            scheduler.decode([1], selector)
        scheduler.finish(1)
        scheduler.extend({1: prompt_len}, lambda rng, seq_len: [-1] * TOP_K)


def test_a_batch_larger_than_the_workspace_goes_in_groups(scheduler: FakeScheduler) -> None:
    scheduler.extend({5: 100})
    assert scheduler.extend({1: 200, 5: 50, 2: 120, 3: 200, 4: 1}, padding=7) == 3
    for _ in range(12):
        scheduler.decode([2, 5, 1, 4, 3], sweeping)


def test_fp8_rows() -> None:
    scheduler = FakeScheduler(debug=True, row_format=Fp8DsMlaRow())
    scheduler.extend({1: 30, 2: 20})
    for step in range(30):
        scheduler.decode([2, 1], SELECTORS[step % len(SELECTORS)])
    scheduler.coordinator.check()


def test_layers_do_not_share_state(scheduler: FakeScheduler) -> None:
    """FIELD: a process that owns layers 30 to 33. What one layer selects changes no other, whatever the order."""
    scheduler.extend({1: 60})
    hot = scheduler.coordinator.hot_buffer
    for layer_id in reversed(LAYERS):
        before = hot.rows.clone(), hot.owners.clone(), hot.lru_order.clone()
        scheduler.select(layer_id, [1], [anywhere(scheduler.rng, 60)])
        others = [layer for layer in range(len(LAYERS)) if layer != layer_id - LAYERS.start]
        for now, then in zip((hot.rows, hot.owners, hot.lru_order), before, strict=True):
            assert torch.equal(now[others], then[others])


def test_the_first_decode_step_finds_what_the_last_queries_selected(scheduler: FakeScheduler) -> None:
    scheduler.extend({1: 100, 2: 3}, newest)
    scheduler.decode([1, 2], newest)
    assert scheduler.coordinator.statistics()["missed_positions"] == 0


def test_seeding_takes_the_selections_of_the_last_queries_only(scheduler: FakeScheduler) -> None:
    """Each query selects itself alone: the last SEED_QUERIES tokens are resident, the newest most recently used."""
    scheduler.extend({1: 50}, lambda rng, seq_len: [seq_len - 1] + [-1] * (TOP_K - 1))
    hot = scheduler.coordinator.hot_buffer
    for layer in range(len(LAYERS)):
        assert hot.owners[layer, 1, :SEED_QUERIES].tolist() == [49 - i for i in range(SEED_QUERIES)]
        assert bool((hot.owners[layer, 1, SEED_QUERIES:] == -1).all())
        assert int(hot.lru_order[layer, 1, -1]) == 0


def test_nothing_is_ever_pending(scheduler: FakeScheduler) -> None:
    assert scheduler.coordinator.wait_for_pending_backup() is None
    assert scheduler.coordinator.statistics()["hit_rate"] == 1.0


# ---- debug mode: what it poisons and what it notices


def test_rows_that_hold_nothing_are_nan() -> None:
    scheduler = FakeScheduler(debug=True)
    coordinator = scheduler.coordinator
    for rows in (coordinator.host_pool.rows, coordinator.hot_buffer.rows):
        assert bool((rows == POISON).all())
    for row_format in (scheduler.row_format, Fp8DsMlaRow()):
        rows = torch.full((1, row_format.row_bytes), POISON, dtype=torch.uint8)
        assert all(bool(part.isnan().all()) for part in row_format.unpack(rows))
    scheduler.extend({1: 30})
    scheduler.decode([1], anywhere)
    region = coordinator.hot_buffer.region_rows(1)
    scheduler.finish(1)
    scheduler.coordinator.begin_extend(
        req_pool_indices=torch.tensor([1]), prefix_lens=[0], extend_lens=[2], out_cache_loc=torch.tensor([4, 5])
    )
    assert bool((coordinator.hot_buffer.rows[:, region] == POISON).all())


def test_debug_notices_an_overwritten_hot_row(debugged: FakeScheduler) -> None:
    hot = debugged.coordinator.hot_buffer
    position, row = next((int(p), i) for i, p in enumerate(hot.owners[1, 2].tolist()) if p >= 0)
    hot.rows[1, hot.region_rows(2).start + row, 5] ^= 1
    with pytest.raises(
        AssertionError, match=rf"region 2: hot rows of positions \[{position}\] are not their host rows"
    ):
        debugged.select(LAYER, [2], [[position] + [-1] * (TOP_K - 1)])


def test_debug_notices_an_overwritten_tail_row(debugged: FakeScheduler) -> None:
    hot, position = debugged.coordinator.hot_buffer, debugged.seq_lens[3] - 1
    hot.rows[1, hot.region_rows(3).start + BUFFER + position % PAGE_SIZE] = 0
    with pytest.raises(AssertionError, match=rf"positions \[{position}\] are not their host rows"):
        debugged.select(LAYER, [3], [newest(debugged.rng, position + 1)])


def test_debug_notices_a_row_of_another_region(debugged: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when that row holds the right bytes."""
    hot, kernel = debugged.coordinator.hot_buffer, hisparse.coordinator.kernel

    def misplaced(**arguments: Any) -> torch.Tensor:
        row_ids: torch.Tensor = kernel.swap_in(**arguments)
        other = hot.region_rows(3).start
        arguments["hot_rows"][other] = arguments["hot_rows"][row_ids[0, 0]]
        row_ids[0, 0] = other
        return row_ids

    monkeypatch.setattr(hisparse.coordinator, "kernel", SimpleNamespace(swap_in=misplaced))
    with pytest.raises(AssertionError, match="a row of another region than 2"):
        debugged.select(LAYER, [2], [beginning(debugged.rng, 40)])


def test_debug_notices_a_host_row_that_has_no_slot(debugged: FakeScheduler) -> None:
    missing = next(p for p in range(40) if p not in debugged.coordinator.hot_buffer.owners[1, 2].tolist())
    debugged.req_to_token[2, missing] = -1
    with pytest.raises(AssertionError, match="lost or invented positions"):
        debugged.select(LAYER, [2], [[missing] + [-1] * (TOP_K - 1)])


def test_debug_notices_a_host_row_that_changed_under_a_resident_position(debugged: FakeScheduler) -> None:
    position = next(p for p in debugged.coordinator.hot_buffer.owners[1, 2].tolist() if p >= 0)
    debugged.coordinator.host_pool.rows[1, int(debugged.req_to_token[2, position])] = POISON
    with pytest.raises(AssertionError, match=rf"positions \[{position}\] are not their host rows"):
        debugged.select(LAYER, [2], [[position] + [-1] * (TOP_K - 1)])


def test_debug_notices_a_host_row_that_was_never_written(debugged: FakeScheduler) -> None:
    """A dropped backup: the miss copies poison, so that hot row and host row agree."""
    missing = next(p for p in range(40) if p not in debugged.coordinator.hot_buffer.owners[1, 2].tolist())
    debugged.coordinator.host_pool.rows[1, int(debugged.req_to_token[2, missing])] = POISON
    with pytest.raises(AssertionError, match=rf"positions \[{missing}\] were never written"):
        debugged.select(LAYER, [2], [[missing] + [-1] * (TOP_K - 1)])


def test_debug_notices_an_invented_row(debugged: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = hisparse.coordinator.kernel

    def inventive(**arguments: Any) -> torch.Tensor:
        return kernel.swap_in(**arguments).clamp_min(2 * (BUFFER + PAGE_SIZE))

    monkeypatch.setattr(hisparse.coordinator, "kernel", SimpleNamespace(swap_in=inventive))
    with pytest.raises(AssertionError, match="lost or invented positions"):
        debugged.select(LAYER, [2], [[0] + [-1] * (TOP_K - 1)])


# ---- conservation laws


def test_check_notices_an_order_that_is_no_permutation(debugged: FakeScheduler) -> None:
    order = debugged.coordinator.hot_buffer.lru_order
    order[2, 3, 0] = order[2, 3, 1]
    with pytest.raises(AssertionError, match=r"no permutation in \(layer, region\) \[2, 3\]"):
        debugged.coordinator.check()


def test_check_notices_a_position_in_two_rows(debugged: FakeScheduler) -> None:
    debugged.coordinator.hot_buffer.owners[1, 2, [0, 9]] = 7
    with pytest.raises(AssertionError, match=r"two LRU rows in \(layer, region\) \[1, 2\]"):
        debugged.coordinator.check()


def test_check_notices_an_owner_that_is_no_position(debugged: FakeScheduler) -> None:
    debugged.coordinator.hot_buffer.owners[1, 2, 0] = -2
    with pytest.raises(AssertionError, match="owner -2 is no position"):
        debugged.coordinator.check()


@pytest.mark.parametrize(("layers", "regions"), ((2, 3), (1, 4)), ids=("layers", "regions"))
def test_tensors_of_different_sizes_are_our_mistake(layers: int, regions: int) -> None:
    coordinator = FakeScheduler(debug=False).coordinator
    hot = dict(device_buffer_size=BUFFER, page_size=PAGE_SIZE, row_bytes=64, device="cpu")
    with pytest.raises(AssertionError, match=r"1 host layers|3 requests"):
        HiSparseCoordinator(
            config=coordinator.config,
            row_format=coordinator.row_format,
            host_pool=HostPool(layers=1, slots=8, row_bytes=64, pin=False),
            hot_buffer=HotBuffer.allocate(layers=layers, regions=regions, **hot),  # type: ignore[arg-type]
            workspace=torch.zeros((1, fake_scheduler.WORKSPACE, 64), dtype=torch.uint8),
            req_to_token=torch.zeros((3, 8), dtype=torch.int32),
            start_layer=0,
            max_batch=3,
        )


class FakeStream:
    """Does nothing, and notes who waits for whom."""

    def __init__(self, waits: list[tuple[Any, Any]], name: str | None = None) -> None:
        self.waits, self.name = waits, name

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append((self.name or self, other.name or other))


def fake_streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Let side streams be made without a GPU; the waits so far, each by name, "current", or by the stream."""
    waits: list[tuple[Any, Any]] = []
    current = FakeStream(waits, "current")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, **options: FakeStream(waits))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return waits


def test_a_batch_padded_after_swap_in_began_is_not_swapped_in_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that SGLang adds between indexer and attention get -1; the counters count once."""
    scheduler = FakeScheduler(debug=False)
    coordinator = scheduler.coordinator
    scheduler.extend({1: 40, 2: 50})
    waits = fake_streams(monkeypatch)
    coordinator._swap_in_beside = SideStream(torch.device("cuda"))
    coordinator.num_real_reqs.fill_(2)
    regions, lens = torch.tensor([1, 2, 0]), torch.tensor([40, 50, 1])
    selected = torch.arange(8, dtype=torch.int32).repeat(3, 1)
    layer = fake_scheduler.LAYERS.start
    coordinator.start_swap_in(regions[:2], lens[:2], selected[:2], layer)
    counted = coordinator.statistics()["selected_positions"]
    row_ids = coordinator.swap_in_selected_pages(regions, lens, selected, layer)
    assert bool((row_ids[:2] >= 0).all()) and bool((row_ids[2] == -1).all())
    assert coordinator.statistics()["selected_positions"] == counted == 2 * 8
    side = coordinator._swap_in_beside._stream
    assert waits == [(side, "current")], "not before somebody needs the rows"
    coordinator.join_decode()
    coordinator.join_decode()
    assert waits == [(side, "current"), ("current", side)]


def test_the_next_prefix_is_gathered_ahead_into_the_other_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here with streams that do nothing. FakeScheduler compares every row of every layer and group."""
    scheduler = FakeScheduler(debug=True)
    for region in range(1, 5):
        scheduler.extend({region: 90})
    fake_streams(monkeypatch)
    coordinator = scheduler.coordinator
    rows = torch.zeros((2, fake_scheduler.WORKSPACE, coordinator.row_format.row_bytes), dtype=torch.uint8)
    workspace = coordinator.workspace = Workspace(rows, coordinator.host_pool, POISON)
    workspace._beside, workspace._gathers_ahead = SideStream(torch.device("cuda")), True
    gathered: list[int] = []
    gather = workspace._gather

    def counting(layer: int, group: Any) -> None:
        gathered.append(layer)
        gather(layer, group)

    monkeypatch.setattr(workspace, "_gather", counting)
    groups = scheduler.extend({1: 20, 2: 7, 3: 1, 4: 30})
    layers = len(fake_scheduler.LAYERS)
    assert groups == 2 and gathered == sorted(gathered)
    assert len(gathered) == groups * layers, "each prefix once"
    assert bool((rows[0] != 0).any()) and bool((rows[1] != 0).any()), "both buffers were in use"
