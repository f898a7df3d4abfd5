"""Mixed load for a while: does anything fail, does memory grow, does the log stay clean?

    python benchmark/serving/soak.py --minutes 10                            # starts a small server on the CPU
    python benchmark/serving/soak.py --minutes 30 --url http://127.0.0.1:30000 --pid PID --log server.log \
        --longest-prompt 32000 --longest-output 1000 --vocabulary 100000     # a server that runs already

Prompts of mixed length, shared prefixes, conversations; the number of clients changes every --phase seconds; a share
of the clients goes away in the middle. Resident memory of the server's processes is sampled every few seconds; its
slope is fitted over the second half, when pools and caches have been touched. Exit status 1 if a request failed, the
log has an error, the server is gone, or memory grows faster than --most-growth.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

import psutil

from hisparse.cpu.checkpoint import make_checkpoint
from hisparse.local_server import LocalServer

SAMPLE_S = 2.0
ERROR = re.compile(r"Traceback|\bERROR\b|\bleak|Error:|CRITICAL")
CPU_SERVER = (
    *("--context-length", "4096"),
    *("--max-total-tokens", "8192"),
    *("--max-running-requests", "8"),
    *("--chunked-prefill-size", "512"),
    *("--schedule-conservativeness", "0.1"),  # so that a full pool retracts now and then
    "--sleep-on-idle",
)
HISPARSE = ("--enable-hisparse", "--hisparse-config", '{"device_buffer_size": 128}')


@dataclass
class Load:
    """What the clients share."""

    options: argparse.Namespace
    end: float
    clients: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, **what: int) -> None:
        with self.lock:
            self.counts.update(what)


class Client(threading.Thread):
    """One user: a conversation now and then, a shared prefix, something new; and sometimes it goes away."""

    def __init__(self, number: int, load: Load) -> None:
        super().__init__(daemon=True)
        self.number, self.load = number, load
        self.random = random.Random(load.options.seed * 1000 + number)
        self.history: list[int] = []

    def run(self) -> None:
        while time.monotonic() < self.load.end:
            if self.number >= self.load.clients:
                time.sleep(0.2)
                continue
            try:
                self.ask()
            except Exception as error:  # whatever it is, it is a finding
                with self.load.lock:
                    self.load.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(1)

    def ask(self) -> None:
        options, draw = self.load.options, self.random
        prompt = self.prompt()
        new = max(1, int(options.longest_output ** draw.random()))
        leaves_after = draw.randrange(new + 1) if draw.random() < options.aborts else None
        address = urlparse(options.url)
        connection = HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=options.timeout)
        started, tokens = time.perf_counter(), 0
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        }
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            if leaves_after == 0:
                time.sleep(draw.random() * 0.5)
                self.load.count(requests=1, left=1)
                return
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {answer.read(300)!r}")
            last: dict[str, Any] = {}
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                last = json.loads(line[6:])
                if not tokens:
                    with self.load.lock:
                        self.load.first_token_s.append(time.perf_counter() - started)
                tokens = last["meta_info"]["completion_tokens"]
                if leaves_after is not None and tokens >= leaves_after:
                    self.load.count(requests=1, left=1, output_tokens=tokens)
                    return
            reason = (last.get("meta_info") or {}).get("finish_reason") or {}
            if reason.get("type") != "length" or tokens != new:
                raise RuntimeError(f"{tokens} of {new} tokens for a prompt of {len(prompt)}: {reason}")
        finally:
            connection.close()
        self.load.count(requests=1, finished=1, output_tokens=tokens, prompt_tokens=len(prompt),
                        cached_tokens=last["meta_info"]["cached_tokens"])  # fmt: skip
        self.history = prompt + last.get("output_ids", [])

    def prompt(self) -> list[int]:
        options, draw = self.load.options, self.random
        kind = draw.random()
        if kind < 0.3 and 0 < len(self.history) < options.longest_prompt // 2:
            return self.history + self.tokens(draw, draw.randint(1, 50))
        length = max(1, int(options.longest_prompt ** draw.random()))
        if kind < 0.6:
            shared = random.Random(draw.randrange(8))
            return self.tokens(shared, min(length, options.longest_prompt // 4)) + self.tokens(draw, 20)
        return self.tokens(draw, length)

    def tokens(self, source: random.Random, count: int) -> list[int]:
        return [source.randrange(2, self.load.options.vocabulary) for _ in range(count)]


def resident_mib(process: psutil.Process) -> dict[str, float]:
    """Resident memory of each of the server's processes, by its title."""
    resident = {}
    for one in [process, *process.children(recursive=True)]:
        try:
            title = "launcher" if one == process else (one.cmdline() or [one.name()])[0].removeprefix("sglang::")
            resident[f"{Path(title).name} {one.pid}"] = one.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    return resident


class Sample(NamedTuple):
    time_s: float
    resident: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.resident.values())


def slope_per_minute(points: list[tuple[float, float]]) -> float:
    """Least squares over (seconds, MiB)."""
    if len(points) < 2:
        return 0.0
    times, values = zip(*points, strict=True)
    return statistics.linear_regression(times, values).slope * 60


def soak(options: argparse.Namespace, process: psutil.Process | None) -> tuple[Load, list[Sample]]:
    start = time.monotonic()
    load = Load(options, start + 60 * options.minutes)
    threads = [Client(number, load) for number in range(options.clients)]
    for thread in threads:
        thread.start()
    samples: list[Sample] = []
    phases = random.Random(options.seed)
    next_phase = next_line = start
    while time.monotonic() < load.end and (process is None or process.is_running()):
        now = time.monotonic()
        if now >= next_phase:
            next_phase += options.phase
            load.clients = phases.choice((1, options.clients // 2, options.clients, options.clients))
        if process is not None:
            samples.append(Sample(now - start, resident_mib(process)))
        if now >= next_line:
            next_line += 30
            memory = f", {samples[-1].total:.0f} MiB" if samples else ""
            print(f"{now - start:6.0f} s: {load.clients} clients{memory}, {dict(load.counts)}", flush=True)
        time.sleep(SAMPLE_S)
    for thread in threads:
        thread.join(options.timeout)
    return load, samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--url", help="a running server; not given: a small one is started on the CPU")
    parser.add_argument("--without-hisparse", action="store_true", help="start the server on the CPU without it")
    parser.add_argument("--pid", type=int, help="the launcher of the server at --url, for its memory")
    parser.add_argument("--log", type=Path, help="the log of the server at --url")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--phase", type=float, default=30, help="seconds until the number of clients changes")
    parser.add_argument("--aborts", type=float, default=0.15, help="share of requests whose client goes away")
    parser.add_argument("--longest-prompt", type=int, default=2500)
    parser.add_argument("--longest-output", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, default=250, help="token ids are below this")
    parser.add_argument("--most-growth", type=float, default=2.0, help="MiB a minute in the second half")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a request may take")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hisparse-soak-")))
            make_checkpoint(folder / "model", style="conditioned", layers=2, index_topk=64)
            options.log = folder / "log"
            flags = CPU_SERVER if options.without_hisparse else (*CPU_SERVER, *HISPARSE)
            server = stack.enter_context(LocalServer(folder / "model", *flags, log=options.log))
            options.url, options.pid = server.url, server.pid
        process = psutil.Process(options.pid) if options.pid else None
        started = len(options.log.read_text(errors="replace")) if options.log else 0
        load, samples = soak(options, process)
        alive = process is None or process.is_running()
        log = options.log.read_text(errors="replace")[started:] if options.log else ""
    return report(options, load, samples, alive, log)


def report(options: argparse.Namespace, load: Load, samples: list[Sample], alive: bool, log: str) -> int:
    half = [sample for sample in samples if sample.time_s >= 30 * options.minutes]
    growth = slope_per_minute([(sample.time_s, sample.total) for sample in half])
    errors = [line for line in log.splitlines() if ERROR.search(line)]
    waits = sorted(load.first_token_s)
    print(f"{dict(load.counts)} in {options.minutes:g} minutes, {len(load.failures)} failures")
    print(f"retractions in the log: {log.count('Retract requests')}; lines with errors: {len(errors)}")
    if waits:
        print(f"time to first token: median {statistics.median(waits):.2f} s, longest {waits[-1]:.2f} s")
    if half:
        print(f"resident memory: {half[0].total:.0f} MiB at half time, {half[-1].total:.0f} MiB at the end, "
              f"slope of the second half {growth:+.2f} MiB a minute")  # fmt: skip
        for name, mib in half[-1].resident.items():
            points = [(sample.time_s, sample.resident[name]) for sample in half if name in sample.resident]
            print(f"  {name}: {mib:.0f} MiB, {slope_per_minute(points):+.2f} MiB a minute")
    wrong = [f"failed: {line}" for line in load.failures[:10]] + [f"log: {line}" for line in errors[:10]]
    if not alive:
        wrong.append("the server is gone")
    if growth > options.most_growth:
        wrong.append(f"memory grows by {growth:.2f} MiB a minute")
    if not load.counts["finished"]:
        wrong.append("nothing finished")
    print("\n".join(wrong) or "no failure, no error, no growth")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
