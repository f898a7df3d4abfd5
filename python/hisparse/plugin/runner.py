"""Builds the coordinator of a model runner, and reports its state."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import torch

import hisparse_kernel
from hisparse.budget import MemoryBudget
from hisparse.coordinator import HiSparseCoordinator
from hisparse.memory import HotBuffer
from hisparse.plugin.gate import stopping_the_server
from hisparse.plugin.server_args import active_config, processes_per_host
from hisparse.plugin.sizing import index_key_bytes
from hisparse.plugin.tracing import data_parallel_rank, make_recorder
from hisparse.swap_in_timer import working_timer

logger = logging.getLogger(__name__)

DEBUG_VARIABLE = "HISPARSE_DEBUG"
"""Set to 1: rows that hold nothing are NaN, every swapped-in row is compared with its host row, and the conservation
laws are checked when the server is idle."""


def attach_coordinator(model_runner: Any) -> None:
    """Allocate the device state that the budget planned, print the budget, and set the runner's coordinator."""
    config = active_config(model_runner.server_args)
    assert config is not None
    pool = model_runner.token_to_kv_pool
    requests = model_runner.req_to_token_pool.req_to_token
    row_format = pool.row_format
    budget = MemoryBudget(
        config=config,
        layers=pool.layer_num,
        row_bytes=row_format.row_bytes,
        index_key_bytes=index_key_bytes(model_runner.model_config),
        regions=requests.shape[0],
        slots=pool.size,
    )
    hot_buffer = HotBuffer.allocate(
        layers=pool.layer_num,
        regions=budget.regions,
        device_buffer_size=config.device_buffer_size,
        page_size=config.page_size,
        row_bytes=row_format.row_bytes,
        device=model_runner.device,
    )
    pool.hot_buffer = hot_buffer
    pool.debug = os.environ.get(DEBUG_VARIABLE) == "1"
    if hot_buffer.rows.is_cuda:
        # Not at the first call: that may come under graph capture, where nothing can be compiled or loaded.
        hisparse_kernel.warm_up()
    model_runner.hisparse_coordinator = HiSparseCoordinator(
        config=config,
        row_format=row_format,
        host_pool=pool.host_pool,
        hot_buffer=hot_buffer,
        workspace=torch.zeros(
            (config.workspaces, config.workspace_tokens, row_format.row_bytes),
            dtype=torch.uint8,
            device=model_runner.device,
        ),
        req_to_token=requests,
        start_layer=pool.start_layer,
        max_batch=budget.max_batch,
        debug=pool.debug,
    )
    coordinator = model_runner.hisparse_coordinator
    if model_runner.server_args.enable_metrics:
        coordinator.timer = working_timer(pool.layer_num // 2, hot_buffer.rows.device)
    with stopping_the_server():
        coordinator.recorder = make_recorder(model_runner, budget)
    model_runner.hisparse_budget = budget
    logger.info(budget.table(processes_per_host(model_runner.server_args)))


def after_forward(model_runner: Any, forward_batch: Any) -> None:
    """Tell the coordinator which requests a forward pass was for; a replayed graph never comes through it."""
    coordinator: HiSparseCoordinator = model_runner.hisparse_coordinator
    rids = forward_batch.rids
    if rids is None:  # SGLang's own warm-up
        return
    if forward_batch.forward_mode.is_decode():
        coordinator.after_decode(rids, forward_batch.seq_lens)
    elif forward_batch.forward_mode.is_extend():
        coordinator.after_extend(rids)


def report_state(model_runner: Any) -> dict[str, Any]:
    """The `hisparse` entry of `/server_info`: configuration, sizes in bytes, and what swap-in did so far."""
    budget: MemoryBudget = model_runner.hisparse_budget
    coordinator: HiSparseCoordinator = model_runner.hisparse_coordinator
    config = dataclasses.asdict(budget.config)
    config.pop("notes")
    config.pop("trace")
    return {
        "config": config,
        "dp_rank": data_parallel_rank(model_runner),
        "regions": budget.regions - 1,
        "host_pool_tokens": budget.slots,
        "device_bytes": budget.device_bytes,
        "hot_rows_bytes": budget.hot_rows_bytes,
        "workspace_bytes": budget.workspace_bytes,
        "index_keys_bytes": budget.index_keys_bytes,
        "host_pool_bytes": budget.host_pool_bytes,
        "processes_per_host": processes_per_host(model_runner.server_args),
        "trace_folder": None if coordinator.recorder is None else str(coordinator.recorder.writer.folder),
        **coordinator.statistics(),
    }
