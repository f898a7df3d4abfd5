"""HiSparse's figures in SGLang's /metrics, decode log line and /server_info."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from hisparse.plugin.snapshot import CounterSnapshot

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "sglang:hisparse_"

SWAP_IN_BUCKETS_S = (
    5e-6,
    1e-5,
    2e-5,
    3e-5,
    5e-5,
    7e-5,
    1e-4,
    1.5e-4,
    2e-4,
    3e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    5e-2,
    0.2,
)
"""From an idle GPU's floor to torch operators on a CPU."""


class Metric(NamedTuple):
    """A counter or gauge. `figure` is its name in `HiSparseMetrics.figures` and, for counters, in /server_info."""

    name: str
    figure: str
    help: str


COUNTERS = (
    Metric("selected_positions_total", "selected_positions",
           "Positions that decode selected, over all layers; the sum of tail ring, hit and missed."),
    Metric("tail_ring_positions_total", "tail_ring_positions",
           "Selected positions found in the tail ring, the newest generated tokens."),
    Metric("hit_positions_total", "hit_positions", "Selected positions whose row was in the hot buffer already."),
    Metric("missed_positions_total", "missed_positions",
           "Selected positions whose row was copied from the host pool."),
    Metric("swapped_in_bytes_total", "swapped_in_bytes", "Bytes copied from the host pool for missed positions."),
    Metric("backed_up_bytes_total", "backed_up_bytes",
           "Bytes of new rows written through to the host pool, in prefill and decode."),
    Metric("prefix_tokens_gathered_total", "prefix_tokens_gathered",
           "Tokens whose rows prefill read back from the host pool: cached prefixes and earlier chunks."),
    Metric("retractions_total", "retractions", "Requests retracted because the host pool was full."),
)  # fmt: skip

GAUGES = (
    Metric("host_pool_tokens", "host_pool_tokens", "Tokens that the host pool holds."),
    Metric("host_pool_used_tokens", "host_pool_used_tokens", "Tokens of the host pool held by running requests."),
    Metric("host_pool_cached_tokens", "host_pool_cached_tokens",
           "Tokens of the host pool kept for prefix reuse; they make room when needed."),
    Metric("regions", "regions", "Requests that can run at once, each with a region of the hot buffer."),
    Metric("regions_used", "regions_used", "Regions that belong to a request now."),
)  # fmt: skip

SWAP_IN_SECONDS = "swap_in_seconds"
SWAP_IN_HELP = "Time of one swap-in call, one layer and the whole batch; one sample each decode log interval."


class HiSparseMetrics:
    """One scheduler's figures. Made after the model runner; everything here runs on the scheduler's thread.

    Device counters come by a copy that is enqueued a step before they are needed, so that no step waits. Without
    --enable-metrics only the log line is fed.

    Args:
        scheduler: SGLang's.
        registry: prometheus_client's, None = its default, which is the one that SGLang serves.
    """

    def __init__(self, scheduler: Any, registry: Any = None) -> None:
        self._scheduler = scheduler
        runner = scheduler.tp_worker.model_runner
        self._coordinator = runner.hisparse_coordinator
        self._budget = runner.hisparse_budget
        self._pool = runner.token_to_kv_pool
        self._snapshot = CounterSnapshot(self._coordinator.counters, scheduler.forward_stream)
        self._published_passes = -1
        self._logged: Mapping[str, float] = self.figures(wait=True)
        self._counted: dict[str, float] = dict.fromkeys((counter.figure for counter in COUNTERS), 0)
        reporter = scheduler.metrics_reporter
        self._registered = reporter.current_scheduler_metrics_enabled
        if self._registered:
            self._register(reporter.metrics_collector.labels, registry)

    def _register(self, labels: Mapping[str, Any], registry: Any) -> None:
        # Not at the top: SGLang sets the folder that its processes share before prometheus_client may be imported.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        registry, names = registry or REGISTRY, tuple(labels)
        self._counters = {
            counter.figure: Counter(PREFIX + counter.name, counter.help, names, registry=registry).labels(**labels)
            for counter in COUNTERS
        }
        self._gauges = {
            gauge.figure: Gauge(
                PREFIX + gauge.name, gauge.help, names, registry=registry, multiprocess_mode="mostrecent"
            ).labels(**labels)
            for gauge in GAUGES
        }
        self._swap_in = Histogram(
            PREFIX + SWAP_IN_SECONDS, SWAP_IN_HELP, names, registry=registry, buckets=SWAP_IN_BUCKETS_S
        ).labels(**labels)

    def figures(self, *, wait: bool = False) -> dict[str, int | float]:
        """Totals and states by name. Device counters are the last copy's; `wait` makes a new one and waits for it."""
        if wait:
            self._snapshot.enqueue()
        counters = self._snapshot.read(wait=wait)
        return {**self._coordinator.statistics(counters), **self.states()}

    def states(self) -> dict[str, int]:
        """What SGLang's pools hold now."""
        scheduler = self._scheduler
        cached = scheduler.tree_cache.evictable_size()
        free = scheduler.token_to_kv_pool_allocator.available_size()
        regions = self._budget.regions - 1
        return {
            "retractions": self._pool.retractions,
            "host_pool_tokens": self._budget.slots,
            "host_pool_used_tokens": self._budget.slots - free - cached,
            "host_pool_cached_tokens": cached,
            "regions": regions,
            "regions_used": regions - scheduler.req_to_token_pool.available_size(),
        }

    # ---- when

    def before_decode_report(self) -> list[str]:
        """After every decode step, before SGLang reports it. Returns what its log line shall say, if it is due now."""
        reporter = self._scheduler.metrics_reporter
        steps, interval = reporter.forward_ct_decode, reporter.decode_log_interval
        line = self._report() if steps % interval == 0 else []
        if (steps + 1) % interval == 0:
            self._snapshot.enqueue()
        return line

    def when_idle(self) -> None:
        """Nothing runs: the last steps' figures, once."""
        if self._published_passes != self._scheduler.forward_ct:
            self._published_passes = self._scheduler.forward_ct
            self._publish(self.figures(wait=True))

    def _report(self) -> list[str]:
        figures = self.figures()
        self._publish(figures, None if self._coordinator.timer is None else self._coordinator.timer.take())
        selected = figures["selected_positions"] - self._logged["selected_positions"]
        missed = figures["missed_positions"] - self._logged["missed_positions"]
        megabytes = (figures["swapped_in_bytes"] - self._logged["swapped_in_bytes"]) / 1e6
        self._logged = figures
        return [
            f"hisparse hit rate: {1 - missed / selected if selected else 1.0:.3f}",
            f"swapped in: {megabytes:.1f} MB",
            f"regions: {figures['regions_used']}/{figures['regions']}",
        ]

    def _publish(self, figures: Mapping[str, float], swap_in_s: float | None = None) -> None:
        if not self._registered:
            return
        for name, counter in self._counters.items():
            counter.inc(figures[name] - self._counted[name])
            self._counted[name] = figures[name]
        for name, gauge in self._gauges.items():
            gauge.set(figures[name])
        if swap_in_s is not None:
            self._swap_in.observe(swap_in_s)


def guarded(scheduler: Any, ask: Callable[[HiSparseMetrics], T]) -> T | None:
    """`ask` of the scheduler's figures, which are made at the first call. A measurement must not stop a server: the
    first error is logged, and from then on the answer is None."""
    try:
        if not hasattr(scheduler, "hisparse_metrics"):
            scheduler.hisparse_metrics = HiSparseMetrics(scheduler)
        return None if scheduler.hisparse_metrics is None else ask(scheduler.hisparse_metrics)
    except Exception:
        scheduler.hisparse_metrics = None
        logger.exception("HiSparse: no more metrics from this process")
        return None
