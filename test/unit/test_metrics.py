"""HiSparse's figures beside a scheduler of which only the asked-for parts exist."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_scheduler import LAYERS, FakeScheduler, anywhere
from prometheus_client import CollectorRegistry

from hisparse.plugin.metrics import COUNTERS, GAUGES, PREFIX, HiSparseMetrics, guarded
from hisparse.plugin.snapshot import CounterSnapshot
from hisparse.swap_in_timer import SwapInTimer, working_timer

LABELS = {"model_name": "m", "tp_rank": 0}
INTERVAL = 3
SLOTS, CACHED, FREE = 1000, 300, 500


class World:
    """A coordinator that works, and a scheduler's attributes."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.fake = FakeScheduler(debug=False)
        self.fake.coordinator.timer = working_timer(1, torch.device("cpu"))
        self.registry = CollectorRegistry()
        self.pool = SimpleNamespace(retractions=0)
        self.scheduler: Any = SimpleNamespace(
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(
                    hisparse_coordinator=self.fake.coordinator,
                    hisparse_budget=SimpleNamespace(regions=9, slots=SLOTS),
                    token_to_kv_pool=self.pool,
                )
            ),
            metrics_reporter=SimpleNamespace(
                current_scheduler_metrics_enabled=enabled,
                metrics_collector=SimpleNamespace(labels=LABELS),
                forward_ct_decode=0,
                decode_log_interval=INTERVAL,
            ),
            tree_cache=SimpleNamespace(evictable_size=lambda: CACHED),
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: FREE),
            req_to_token_pool=SimpleNamespace(available_size=lambda: 6),
            forward_stream=None,
            forward_ct=0,
        )
        self.metrics = HiSparseMetrics(self.scheduler, self.registry)

    def step(self) -> list[str]:
        self.fake.decode([2, 3], anywhere)
        self.scheduler.forward_ct += 1
        self.scheduler.metrics_reporter.forward_ct_decode += 1
        return self.metrics.before_decode_report()

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(PREFIX + name, {key: str(value) for key, value in LABELS.items()})


@pytest.fixture
def world() -> World:
    world = World()
    world.fake.extend({2: 40, 3: 50})
    return world


def test_all_metrics_exist_before_anything_happened() -> None:
    world = World()
    assert [world.value(metric.name) for metric in COUNTERS] == [0] * len(COUNTERS)
    assert [world.value(metric.name) for metric in GAUGES] == [0] * len(GAUGES)
    assert world.value("swap_in_seconds_count") == 0


def test_counters_follow_at_the_interval_and_when_idle(world: World) -> None:
    lines = [world.step() for _ in range(2 * INTERVAL)]
    assert [bool(line) for line in lines] == [False, False, True] * 2
    # The copy was enqueued a step before: without overlap it lacks the step that is being reported.
    lagging, exact = world.value("selected_positions_total"), world.fake.coordinator.statistics()
    assert lagging is not None and 0 < lagging < exact["selected_positions"]
    world.metrics.when_idle()
    for metric in COUNTERS:
        assert world.value(metric.name) == exact.get(metric.figure, 0), metric.name
    kinds = [world.value(f"{kind}_positions_total") for kind in ("tail_ring", "hit", "missed")]
    assert sum(kind or 0 for kind in kinds) == world.value("selected_positions_total")
    assert world.value("swap_in_seconds_count") == 2 + 0
    world.metrics.when_idle()
    assert world.value("selected_positions_total") == exact["selected_positions"], "counted twice"


def test_the_state_of_the_pools(world: World) -> None:
    world.pool.retractions = 4
    world.scheduler.forward_ct = 1
    world.metrics.when_idle()
    assert world.value("host_pool_tokens") == SLOTS
    assert world.value("host_pool_used_tokens") == SLOTS - CACHED - FREE
    assert world.value("host_pool_cached_tokens") == CACHED
    assert (world.value("regions"), world.value("regions_used")) == (8, 2)
    assert world.value("retractions_total") == 4


def test_the_log_line_is_about_the_time_since_the_last(world: World) -> None:
    totals = []
    for _ in range(2):
        for _ in range(INTERVAL - 1):
            world.step()
        totals.append(world.fake.coordinator.statistics())
        line = world.step()
    missed, selected, nbytes = (
        totals[1][name] - totals[0][name] for name in ("missed_positions", "selected_positions", "swapped_in_bytes")
    )
    assert line == [
        f"hisparse hit rate: {1 - missed / selected:.3f}",
        f"swapped in: {nbytes / 1e6:.1f} MB",
        "regions: 2/8",
    ]


def test_without_enable_metrics_only_the_log_line_is_fed() -> None:
    world = World(enabled=False)
    world.fake.extend({2: 40, 3: 50})
    lines = [world.step() for _ in range(INTERVAL)]
    assert lines[-1] and list(world.registry.collect()) == []


def test_an_error_ends_the_measuring_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.scheduler.hisparse_metrics = world.metrics

    def broken() -> int:
        raise RuntimeError("no such pool")

    world.scheduler.tree_cache.evictable_size = broken
    with caplog.at_level(logging.ERROR):
        assert [guarded(world.scheduler, lambda metrics: metrics.states()) for _ in range(3)] == [None] * 3
    assert caplog.text.count("no more metrics from this process") == 1
    nothing = SimpleNamespace()
    assert guarded(nothing, lambda metrics: metrics.states()) is None and nothing.hisparse_metrics is None


def test_a_snapshot_is_a_copy() -> None:
    source = torch.tensor([[1, 2, 3]])
    snapshot = CounterSnapshot(source, None)
    assert snapshot.read().tolist() == [[0, 0, 0]]
    snapshot.enqueue()
    source += 5
    assert snapshot.read(wait=True).tolist() == [[1, 2, 3]]


def test_a_sample_is_taken_once() -> None:
    timer = SwapInTimer(0, torch.device("cpu"))
    assert timer.take() is None
    timer.start()
    timer.stop()
    seconds = timer.take()
    assert seconds is not None and seconds >= 0
    assert timer.take() is None


def test_only_the_chosen_layer_is_timed(world: World) -> None:
    timer = world.fake.coordinator.timer
    assert timer is not None
    timer.take()
    for layer_id, expected in ((LAYERS.start, False), (LAYERS.start + 1, True)):
        world.fake.select(layer_id, [2], [[0] * world.fake.coordinator.config.top_k])
        assert (timer.take() is not None) == expected
