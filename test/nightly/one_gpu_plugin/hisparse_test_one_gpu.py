"""A plug-in of SGLang that puts all ranks of a server on one GPU, with and without HiSparse alike.

NCCL refuses two ranks of a device, so collectives go over gloo. They wait for the host, which CUDA graphs cannot hold:
start the server with --disable-cuda-graph, and with the variables in `ENVIRONMENT`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENVIRONMENT = {
    "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1",  # every rank's device is number 0
    "SGLANG_NCCL_SO_PATH": "/nonexistent",  # SGLang's own NCCL communicator goes out of the way
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # ranks take from the same memory
}


@contextmanager
def same_device(gpu_id: int) -> Iterator[int]:
    """Stands where SGLang would make device `gpu_id` the only visible one."""
    yield 0


def gloo(*, device: str, server_args: Any) -> str:
    return "gloo"


def register() -> None:
    if os.environ.get("SGLANG_NCCL_SO_PATH") != ENVIRONMENT["SGLANG_NCCL_SO_PATH"]:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for module in ("entrypoints.engine", "managers.data_parallel_controller"):
        HookRegistry.register(f"sglang.srt.{module}.maybe_reindex_device_id", same_device, HookType.REPLACE)
    HookRegistry.register("sglang.srt.distributed.bootstrap._resolve_backend", gloo, HookType.REPLACE)
