"""Starts a recording of selections if `--hisparse-config` asks for one."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from hisparse.budget import MemoryBudget
from hisparse.config import HiSparseError
from hisparse.recorder import SelectionRecorder
from hisparse.trace_writer import TraceWriter

logger = logging.getLogger(__name__)


def data_parallel_rank(model_runner: Any) -> int:
    """Number of the attention group, or of the replica, that this process belongs to; 0 without data parallelism."""
    ps = model_runner.ps
    return ps.attn_dp_rank if ps.dp_rank is None else ps.dp_rank


def make_recorder(model_runner: Any, budget: MemoryBudget) -> SelectionRecorder | None:
    """The recorder of this process; None without `trace`, and on all but the first tensor-parallel rank, since all of
    them select the same. Raises `HiSparseError` for a folder that cannot be made, or layers that are not there."""
    config, trace = budget.config, budget.config.trace
    pool = model_runner.token_to_kv_pool
    if trace is None or model_runner.ps.attn_tp_rank != 0:
        return None
    rank = data_parallel_rank(model_runner)
    layers = trace.layers_of(pool.start_layer, pool.layer_num)
    # A folder of its own for every start: parts of two runs are not one trace.
    folder = Path(trace.folder).absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-rank{rank}"
    about = {
        "model": model_runner.server_args.served_model_name,
        "page_size": config.page_size,
        "row_bytes": budget.row_bytes,
        "device_buffer_size": config.device_buffer_size,
        "layers": layers,
        "num_layers": budget.layers,
        "rank": rank,
        "sampled_requests": trace.requests,
    }
    try:
        writer = TraceWriter(folder, about, trace.max_bytes)
    except OSError as error:
        raise HiSparseError(
            f"--hisparse-config trace={trace.folder!r} must be a folder to write to: {error}."
        ) from None
    logger.info("HiSparse: recording selections of %d of %d layers in %s", len(layers), budget.layers, folder)
    return SelectionRecorder(
        layers=layers,
        max_batch=budget.max_batch,
        top_k=config.top_k,
        share=trace.requests,
        device=pool.hot_buffer.rows.device,
        writer=writer,
    )
