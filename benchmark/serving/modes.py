"""The servers that the concurrency benchmark compares, each with as many requests as one device budget holds."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from hisparse.budget import MemoryBudget
from hisparse.config import HiSparseConfig

ROW_BYTES = 1152
INDEX_KEY_BYTES = 132
INDEX_TOPK = 2048
PAGE = 64
SGLANG = ("-m", "sglang.launch_server")

COMMON = (
    "--load-format", "dummy", "--skip-tokenizer-init", "--kv-cache-dtype", "bfloat16",
    "--dsa-prefill-backend", "flashmla_sparse", "--dsa-decode-backend", "flashmla_sparse",
    "--disable-prefill-cuda-graph", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--mem-fraction-static", "0.9", "--chunked-prefill-size", "8192", "--mm-feature-transport", "cpu",
    "--random-seed", "1", "--incremental-streaming-output", "--stream-interval", "1", "--sleep-on-idle",
    "--schedule-conservativeness", "0.05", "--disable-radix-cache",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """A server: `off`, `builtin` (SGLang's own HiSparse) or `ours`."""

    name: str
    flags: tuple[str, ...]
    environment: dict[str, str]
    sizes: dict[str, float]
    launcher: tuple[str, ...] = SGLANG
    depends_on_hits: bool = field(default=True)


def plan_modes(options: argparse.Namespace, selection: Path) -> list[Mode]:
    """Flags of the servers that `options.modes` names."""
    planned = {"off": _off, "builtin": _builtin, "ours": _ours}
    return [planned[name](options, selection) for name in options.modes]


def _shared(options: argparse.Namespace, requests: int) -> tuple[str, ...]:
    requests = min(requests, max(options.levels)) + 1  # SGLang leaves one place empty while a chunk is under way
    return (
        *COMMON, "--context-length", str(options.prompt + options.new + 64), "--max-running-requests", str(requests),
        "--cuda-graph-max-bs-decode", str(requests),
    )  # fmt: skip


def _off(options: argparse.Namespace, selection: Path) -> Mode:
    tokens = int(options.budget_gib * 2**30) // (options.layers * (ROW_BYTES + INDEX_KEY_BYTES)) // PAGE * PAGE
    flags = (*_shared(options, tokens // options.prompt + 1), "--max-total-tokens", str(tokens))
    environment = {"HISPARSE_BENCH_SELECTION": str(selection), "HISPARSE_BENCH_SLOTS": "1",
                   "SGLANG_PLUGINS": "hisparse_bench_selection"}  # fmt: skip
    return Mode("off", flags, environment, {"tokens": tokens}, depends_on_hits=False)


def _builtin(options: argparse.Namespace, selection: Path) -> Mode:
    """Its device pool holds the hot buffers and, before they are moved to the host, whole prompts: room for two."""
    budget = int(options.budget_gib * 2**30)
    for requests in range(max(options.levels), 0, -1):
        tokens = requests * (options.buffer + PAGE) + 2 * _ceil(options.prompt) + PAGE
        ratio = math.ceil(requests * _kept(options) / tokens)
        nbytes = tokens * options.layers * (ROW_BYTES + ratio * INDEX_KEY_BYTES)
        if nbytes <= budget:
            break
    else:
        raise SystemExit("the budget does not hold one request of SGLang's own HiSparse")
    config = {"top_k": INDEX_TOPK, "device_buffer_size": options.buffer, "host_to_device_ratio": ratio}
    flags = (*_shared(options, requests), "--max-total-tokens", str(tokens), "--enable-hisparse",
             "--hisparse-config", json.dumps(config))  # fmt: skip
    environment = {"HISPARSE_BENCH_SELECTION": str(selection), "SGLANG_PLUGINS": "hisparse_bench_selection"}
    sizes = {"requests": requests, "device_tokens": tokens, "ratio": ratio, "device_bytes": nbytes}
    return Mode("builtin", flags, environment, sizes)


def _ours(options: argparse.Namespace, selection: Path) -> Mode:
    budget = int(options.budget_gib * 2**30)
    config = HiSparseConfig(device_buffer_size=options.buffer).resolve(
        index_topk=INDEX_TOPK, page_size=PAGE, context_len=options.prompt + options.new + 64
    )
    for requests in range(max(options.levels), 0, -1):
        slots = requests * _kept(options)
        planned = MemoryBudget(config, options.layers, ROW_BYTES, INDEX_KEY_BYTES, requests + 2, slots)
        if planned.device_bytes <= budget:
            break
    else:
        raise SystemExit("the budget does not hold one request of ours")
    host_gib = planned.host_pool_bytes // 2**30 + 1
    flags = (*_shared(options, requests), "--max-total-tokens", str(slots), "--enable-hisparse", "--hisparse-config",
             json.dumps({"device_buffer_size": options.buffer, "host_memory_gib": host_gib}))  # fmt: skip
    environment = {"HISPARSE_BENCH_SELECTION": str(selection), "SGLANG_PLUGINS": "hisparse,hisparse_bench_selection"}
    sizes = {"requests": requests, "tokens": slots, "device_bytes": planned.device_bytes}
    return Mode("ours", flags, environment, sizes)


def _kept(options: argparse.Namespace) -> int:
    """Tokens of a request that the pools keep room for; most generate far fewer than `options.new`."""
    return _ceil(options.prompt + 2048)


def _ceil(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE
