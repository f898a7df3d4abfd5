"""Clients that go away by the hundred, and a server that is told to stop while it works."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from hisparse.local_server import LocalServer

from .pair import DEBUG, FLAGS, HISPARSE_FLAGS, Pair, disconnect_after, prompt, wait_until_idle

CLIENTS = 200


def test_hundreds_of_disconnects(pair: Pair) -> None:
    """FIELD F25. Queued, between chunks, in decode, at the last token: wherever each of them happens to be."""
    source = random.Random(0)
    prefix = prompt(500, 300)

    def come_and_go(number: int) -> None:
        draw = random.Random(number)
        ids = prompt(number, int(1500 ** draw.random()))
        if draw.random() < 0.3:
            ids = prefix + ids[:50]
        disconnect_after(pair.on, draw.choice((0, 0, 1, 2, 5)), ids, max_new_tokens=draw.choice((1, 3, 6, 400)))

    with ThreadPoolExecutor(12) as clients:
        list(clients.map(come_and_go, source.sample(range(CLIENTS), CLIENTS)))
    wait_until_idle(pair.on)
    pair.flush()
    pair.generate([prompt(700 + i, 100 + 90 * i) for i in range(4)], max_new_tokens=40)


def selected_positions(server: LocalServer) -> int:
    state = server.hisparse_state()
    assert state is not None
    return state["selected_positions"]


def test_sigterm_under_load(plain_checkpoint: Path, tmp_path: Path) -> None:
    """Running requests end with the tokens they would have had; then every process is gone."""
    prompts = [prompt(i, 50 + 200 * i) for i in range(4)]
    flags = (*FLAGS, *HISPARSE_FLAGS, "--max-total-tokens", "8192")
    with LocalServer(plain_checkpoint, *flags, log=tmp_path / "log", environment=DEBUG) as server:
        expected = [answer["output_ids"] for answer in server.generate(prompts, max_new_tokens=60, ignore_eos=True)]
        server.post("/flush_cache?timeout=30")
        before = selected_positions(server)
        launcher = psutil.Process(server.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        with ThreadPoolExecutor(1) as client:
            answers = client.submit(server.generate, prompts, max_new_tokens=60, ignore_eos=True)
            while selected_positions(server) == before:
                time.sleep(0.05)
            os.kill(server.pid, signal.SIGTERM)
            assert [answer["output_ids"] for answer in answers.result(120)] == expected
        _, left = psutil.wait_procs(processes, timeout=60)
        assert not left, f"still there: {left}"
        log = server.log_text()
    for word in ("Traceback", "leak", "AssertionError"):
        assert word not in log, server.log_tail(60)
