"""Two servers that differ in HiSparse alone, and requests sent to both."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse.local_server import LocalServer
from hisparse.trace_format import Trace, read_trace

INDEX_TOPK = 64
DEVICE_BUFFER_SIZE = 128
PAGE_SIZE = 64
CHUNK = 1024
FLAGS = (
    "--context-length",
    "8192",
    "--max-running-requests",
    "8",
    "--chunked-prefill-size",
    str(CHUNK),
    "--sleep-on-idle",
)
HISPARSE_FLAGS = ("--enable-hisparse", "--hisparse-config", f'{{"device_buffer_size": {DEVICE_BUFFER_SIZE}}}')
SERVE = ("-m", "hisparse.cli", "serve")
FORKED = (str(Path(__file__).with_name("forked_server.py")),)

# Poisons rows that hold nothing, verifies every swapped-in row, checks the conservation laws when idle.
DEBUG = {"HISPARSE_DEBUG": "1", "OMP_NUM_THREADS": "1"}


def prompt(seed: int, length: int) -> list[int]:
    """Token ids without meaning, the same for the same arguments."""
    source = random.Random(seed)
    return [source.randrange(2, 250) for _ in range(length)]


@dataclass
class Pair:
    """HiSparse on and off, otherwise equal."""

    on: LocalServer
    off: LocalServer

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[dict[str, Any]]:
        """Send the prompts as one request to each server; assert equal tokens and cached counts; the answers of on."""
        sampling = {"ignore_eos": True, **sampling}
        on, off = (server.generate(prompts, **sampling) for server in (self.on, self.off))
        for index, (ours, plain) in enumerate(zip(on, off, strict=True)):
            assert_same_tokens(ours["output_ids"], plain["output_ids"], f"prompt {index}")
            counts = [answer["meta_info"]["cached_tokens"] for answer in (ours, plain)]
            assert counts[0] == counts[1], f"prompt {index}: cached tokens on/off {counts}"
        return on

    def __iter__(self) -> Iterator[LocalServer]:
        return iter((self.on, self.off))

    def flush(self) -> None:
        for server in self:
            assert "flushed" in str(server.post("/flush_cache?timeout=30")).lower()

    def check(self) -> None:
        """Both servers live, and neither complained about anything."""
        for name, server in (("on", self.on), ("off", self.off)):
            assert server.alive, f"{name} died:\n{server.log_tail()}"
            assert server.get("/health") is not None
            log = server.log_text()
            for word in ("Traceback", "leak", "AssertionError"):
                assert word not in log, f"{word} in the log of {name}:\n{server.log_tail(80)}"


def disconnect_after(server: LocalServer, chunks: int, ids: list[int], *, max_new_tokens: int = 2000) -> None:
    """Ask for a stream and go away after some chunks of it; 0 = without waiting for the answer to begin."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"input_ids": ids, "stream": True, "sampling_params": {"max_new_tokens": max_new_tokens, "ignore_eos": True}}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    if chunks == 0:
        time.sleep(0.3)
    else:
        answer = connection.getresponse()
        while chunks and (line := answer.readline()):
            chunks -= line.startswith(b"data:")
    connection.close()


def wait_until_idle(server: LocalServer, timeout_s: float = 120) -> None:
    """Until nothing runs or waits, and a moment longer: the checks of an idle scheduler end it if anything is lost."""
    deadline = time.monotonic() + timeout_s
    while server.running_requests():
        assert time.monotonic() < deadline, "requests of clients that went away still run"
        time.sleep(0.1)
    time.sleep(1.0)
    assert server.alive, server.log_tail(80)


def when_written(folder: Path, selected_positions: int) -> Trace:
    """The trace, once it holds all that the server counted; the writer waits a little for more."""
    deadline = time.monotonic() + 30
    while True:
        if any(folder.glob("*.npz")):
            trace = read_trace(folder)
            if ((trace.selected >= 0) & (trace.selected < trace.seq_len[:, None])).sum() >= selected_positions:
                return trace
        assert time.monotonic() < deadline
        time.sleep(0.5)


def assert_same_tokens(ours: list[int], plain: list[int], what: str) -> None:
    same = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))
    assert ours == plain, f"{what}: on and off part after {same} of {len(plain)} tokens"


@contextmanager
def start_pair(
    checkpoint: Path,
    logs: Path,
    *flags: str,
    on_flags: tuple[str, ...] = HISPARSE_FLAGS,
    launcher: tuple[str, ...] = SERVE,
) -> Iterator[Pair]:
    """Start both servers at once; stop them in the end, after a last check that both are healthy."""
    on, off = (
        LocalServer(checkpoint, *FLAGS, *extra, *flags, log=logs / f"{name}.log", environment=DEBUG, launcher=launcher)
        for name, extra in (("on", on_flags), ("off", ()))
    )
    try:
        on.start()
        off.start()
        on.wait()
        off.wait()
        pair = Pair(on, off)
        yield pair
        pair.check()
    finally:
        with ThreadPoolExecutor(2) as both:  # each spends seconds on its last words
            list(both.map(LocalServer.stop, (on, off)))
