"""Every place where SGLang's behaviour changes when HiSparse is on. Without --enable-hisparse each does nothing.

SGLang's own HiSparse hides behind two tests: `server_args.enable_hisparse` (allocator, scheduler staging, skipped leak
check) and `model_runner.hisparse_coordinator is not None` (decode calls the coordinator's swap-in, prefill stays
sparse, graphs know the batch size). We want the second and not the first: the flag is cleared, the coordinator set.
"""

from __future__ import annotations

from typing import Any

from hisparse.hook_row import HookRow


def _resolve_server_args(original: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    from hisparse.plugin.server_args import resolve_server_args

    resolve_server_args(lambda: original(server_args, *args, **kwargs), server_args)


def _create_pool_configurator(original: Any, configurator: Any) -> Any:
    from hisparse.plugin.server_args import active_config

    if active_config(configurator.server_args) is None:
        return original(configurator)
    from hisparse.plugin.sizing import HiSparsePoolConfigurator

    return HiSparsePoolConfigurator(configurator)


def _build_kv_pool(original: Any, configurator: Any, *args: Any, **kwargs: Any) -> Any:
    from hisparse.plugin.server_args import active_config

    if active_config(configurator.server_args) is None:
        return original(configurator, *args, **kwargs)
    from sglang.srt.mem_cache import kv_cache_configurator as module

    from hisparse.plugin.kv_pool import HiSparseNSATokenToKVPool

    # The factory names the class through its module; swapping the name keeps its long argument list SGLang's.
    stock, module.DSATokenToKVPool = module.DSATokenToKVPool, HiSparseNSATokenToKVPool
    try:
        return original(configurator, *args, **kwargs)
    finally:
        module.DSATokenToKVPool = stock


def _init_coordinator(original: Any, model_runner: Any) -> None:
    from hisparse.plugin.server_args import active_config

    if active_config(model_runner.server_args) is None:
        original(model_runner)
        return
    from hisparse.plugin.runner import attach_coordinator

    attach_coordinator(model_runner)


def _build_attention_backend(original: Any, **kwargs: Any) -> Any:
    runner = kwargs["model_runner"]
    if kwargs["backend_str"] not in ("dsa", "nsa") or active_coordinator(runner) is None:
        return original(**kwargs)
    from hisparse.plugin.attention_backend import HiSparseAttentionBackend

    runner.init_new_workspace = kwargs["init_new_workspace"]
    return HiSparseAttentionBackend(runner)


def _start_swap_in(
    result: Any,
    indexer: Any,
    x: Any,
    q_lora: Any,
    positions: Any,
    forward_batch: Any,
    layer_id: int,
    *_: Any,
    **__: Any,
) -> Any:
    if result is not None and forward_batch.forward_mode.is_decode():
        from sglang.srt.model_executor.forward_context import get_attn_backend

        # Not from `forward_batch`: eager decode works on a copy without the coordinator.
        coordinator = active_coordinator(get_attn_backend())
        if coordinator is not None:
            coordinator.start_swap_in(forward_batch.req_pool_indices, forward_batch.seq_lens, result, layer_id)
    return result


def _forget_warm_up(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    coordinator = active_coordinator(model_runner)
    if coordinator is not None:
        coordinator.counters.zero_()


def _after_forward(result: Any, model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    if active_coordinator(model_runner) is not None:
        from hisparse.plugin.runner import after_forward

        after_forward(model_runner, forward_batch)


def _count_retractions(result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    from hisparse.plugin.kv_pool import HiSparseNSATokenToKVPool

    pool = batch.token_to_kv_pool_allocator.get_kvcache()
    if isinstance(pool, HiSparseNSATokenToKVPool):
        pool.retractions += len(result[0])


_decode_line: list[str] = []
"""What this scheduler's decode log line says about HiSparse, while SGLang writes it."""


def _report_decode(original: Any, reporter: Any, *args: Any, **kwargs: Any) -> Any:
    scheduler = reporter.scheduler
    if active_coordinator(scheduler.tp_worker.model_runner) is None:
        return original(reporter, *args, **kwargs)
    from hisparse.plugin.metrics import guarded

    _decode_line[:] = guarded(scheduler, lambda metrics: metrics.before_decode_report()) or ()
    try:
        return original(reporter, *args, **kwargs)
    finally:
        _decode_line.clear()


def _extend_decode_line(result: list[str], pool_stats: Any) -> list[str]:
    return [*result, *_decode_line] if _decode_line else result


def _check_when_idle(scheduler: Any) -> None:
    coordinator = active_coordinator(scheduler.tp_worker.model_runner)
    if coordinator is None:
        return
    from hisparse.plugin.metrics import guarded

    if coordinator.debug:
        coordinator.check()
    guarded(scheduler, lambda metrics: metrics.when_idle())


def _poison_freed_pages(result: Any, allocator: Any, *page_ids: Any) -> Any:
    """After a release of some pages, or of all."""
    from hisparse.plugin.kv_pool import HiSparseNSATokenToKVPool

    pool = allocator.get_kvcache()
    if isinstance(pool, HiSparseNSATokenToKVPool) and pool.debug:
        for pages in page_ids or (allocator.free_pages,):
            pool.poison_pages(pages)
    return result


def _report_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    from hisparse.plugin.metrics import guarded
    from hisparse.plugin.runner import report_state

    coordinator = active_coordinator(scheduler.tp_worker.model_runner)
    if coordinator is not None:
        states = guarded(scheduler, lambda metrics: metrics.states()) or {}
        result.internal_state["hisparse"] = report_state(scheduler.tp_worker.model_runner) | states
    return result


def active_coordinator(owner: Any) -> Any:
    """Our coordinator of a model runner or an attention back end, or None."""
    from hisparse.coordinator import HiSparseCoordinator

    coordinator = getattr(owner, "hisparse_coordinator", None)
    return coordinator if isinstance(coordinator, HiSparseCoordinator) else None


HOOKS: tuple[HookRow, ...] = (
    HookRow(
        "sglang.srt.server_args.ServerArgs.__post_init__",
        "around",
        _resolve_server_args,
        "take --enable-hisparse before SGLang acts on it, check what cannot run with it, set back-end defaults",
    ),
    HookRow(
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
        "around",
        _create_pool_configurator,
        "size slots by host memory and regions by --max-running-requests, charge all device state to the budget",
    ),
    HookRow(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_dsa_kv_pool",
        "around",
        _build_kv_pool,
        "rows in the host pool, indexer keys on the device",
    ),
    HookRow(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_init_hisparse_coordinator",
        "around",
        _init_coordinator,
        "hot buffer, workspace and coordinator; after the pools, before back ends and graph capture",
    ),
    HookRow(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup._build_full_attention_backend_from_str",
        "around",
        _build_attention_backend,
        "prefill through the workspace, decode over the hot buffer",
    ),
    HookRow(
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda",
        "after",
        _start_swap_in,
        "begin swap-in when the selection is known, beside the query's projections",
    ),
    HookRow(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
        "after",
        _forget_warm_up,
        "the steps that warm graphs up are nobody's selections",
    ),
    HookRow(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        "after",
        _after_forward,
        "count stored tokens and record selections; a replayed CUDA graph passes through nothing of ours",
    ),
    HookRow(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        "after",
        _count_retractions,
        "count retractions, for servers without --enable-metrics too",
    ),
    HookRow(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
        "around",
        _report_decode,
        "our metrics at SGLang's own interval",
    ),
    HookRow(
        "sglang.srt.managers.scheduler_components.pool_stats_observer.PoolStats.get_decode_usage_msg_parts",
        "after",
        _extend_decode_line,
        "hit rate, bytes and regions in the decode log line",
    ),
    HookRow(
        "sglang.srt.managers.scheduler.Scheduler.on_idle",
        "before",
        _check_when_idle,
        "last figures of a burst; check the conservation laws under HISPARSE_DEBUG",
    ),
    HookRow(
        "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids",
        "after",
        _poison_freed_pages,
        "freed host rows become NaN under HISPARSE_DEBUG, so that a read after the release shows",
    ),
    HookRow(
        "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear",
        "after",
        _poison_freed_pages,
        "the same when the cache is flushed",
    ),
    HookRow(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        _report_state,
        "sizes, totals and what is in use, in /server_info",
    ),
)
