"""GPU servers for the nightly tests: flags, prompts, and two servers that differ in HiSparse alone."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hisparse.local_server import LocalServer

BUFFER = 4096
INDEX_TOPK = 2048
PAGE = 64

MORE_FLAGS = tuple(os.environ.get("HISPARSE_NIGHTLY_FLAGS", "").split())
"""Flags that this machine's SGLang needs, for example --sampling-backend pytorch."""

FLAGS = (
    "--disable-prefill-cuda-graph", "--chunked-prefill-size", "8192", "--random-seed", "1", "--sleep-on-idle",
    *MORE_FLAGS,
)  # fmt: skip

BACKENDS = {"bfloat16": "flashmla_sparse", "fp8_e4m3": "flashmla_kv"}
"""Row format and the attention kernel that reads it."""

# SGLang's default top-k breaks ties as threads come, so a server without HiSparse does not repeat itself either.
REPEATABLE = ("--dsa-topk-backend", "torch", "--enable-fp32-lm-head")
REPEATABLE_ENVIRONMENT = {"SGLANG_DSA_FUSE_TOPK": "false"}


def row_flags(dtype: str) -> tuple[str, ...]:
    backend = BACKENDS[dtype]
    return ("--kv-cache-dtype", dtype, "--dsa-prefill-backend", backend, "--dsa-decode-backend", backend)


def hisparse_flags(**config: Any) -> tuple[str, ...]:
    import json

    return ("--enable-hisparse", "--hisparse-config", json.dumps({"device_buffer_size": BUFFER, **config}))


Pair = dict[str, LocalServer]
"""A server `on` and one `off`."""


def prompt(seed: int, length: int, vocabulary: int = 32_000) -> list[int]:
    """Token ids without meaning, the same for the same arguments."""
    source = random.Random(seed)
    return [source.randrange(260, vocabulary) for _ in range(length)]


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    cached: int


def ask(server: LocalServer, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
    """Greedy answers to prompts sent as one request."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    return [
        Answer(
            answer["output_ids"],
            [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            answer["meta_info"]["cached_tokens"],
        )
        for answer in server.post("/generate", body, timeout_s=1200)
    ]


def flush(pair: Pair) -> None:
    for server in pair.values():
        assert "flushed" in str(server.post("/flush_cache?timeout=60")).lower()


def assert_same(pair: Pair, prompts: list[list[int]], new_tokens: int) -> None:
    flush(pair)
    on, off = (ask(pair[name], prompts, new_tokens) for name in ("on", "off"))
    for index, (ours, plain) in enumerate(zip(on, off, strict=True)):
        pairs = zip(ours.tokens, plain.tokens, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain.tokens))
        assert ours.tokens == plain.tokens, f"prompt {index}: on and off part after {same} of {len(plain.tokens)}"
        assert ours.logprobs == plain.logprobs, f"prompt {index}: same tokens, other log probabilities"
        assert ours.cached == plain.cached


@contextmanager
def start_together(servers: dict[str, LocalServer]) -> Iterator[dict[str, LocalServer]]:
    """Start all at once, then wait: most of a start is compiling and capturing."""
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait()
        yield servers
        for name, server in servers.items():
            assert server.alive, f"{name} died:\n{server.log_tail()}"
            assert "Traceback" not in server.log_text(), f"{name}:\n{server.log_tail(80)}"
    finally:
        for server in servers.values():
            server.stop()
