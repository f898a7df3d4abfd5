"""A plug-in of SGLang that puts all ranks of a server on one GPU, with and without HiSparse alike.

NCCL refuses two ranks of a device, so collectives go over gloo. They wait for the host, which CUDA graphs cannot hold:
start the server with --disable-cuda-graph, and with the variables in `ENVIRONMENT`.
"""

from __future__ import annotations

import os
from typing import Any

ENVIRONMENT = {
    "SGLANG_NCCL_SO_PATH": "/nonexistent",  # SGLang's own NCCL communicator goes out of the way
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # ranks take from the same memory
}


def on_device_0(original: Any, scheduler: Any, server_args: Any, port_args: Any, gpu_id: int, *more: Any) -> None:
    original(scheduler, server_args, port_args, 0, *more)


def gloo(*, device: str, server_args: Any) -> str:
    return "gloo"


def register() -> None:
    if os.environ.get("SGLANG_NCCL_SO_PATH") != ENVIRONMENT["SGLANG_NCCL_SO_PATH"]:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", on_device_0, HookType.AROUND)
    HookRegistry.register("sglang.srt.distributed.bootstrap._resolve_backend", gloo, HookType.REPLACE)
