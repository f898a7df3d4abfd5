"""The scheduler of `worker.py` as an object, and two of them that differ in HiSparse alone."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hisparse.cpu.environment import cpu_environment, cpu_server_args

from ..e2e.pair import HISPARSE_FLAGS

PAGE_SIZE = 64
REGIONS = 4
CHUNK = 256
POOL_TOKENS = 24 * PAGE_SIZE
CONTEXT = 1280
LONGEST_PROMPT = CONTEXT - 7
"""SGLang keeps a request one token, and a prompt six more, below the smaller of context and pool."""

STUCK = 4000
"""Iterations after which a scheduler that is not idle never will be."""

OURS = ("hisparse", "integrity_checks")
"""Entries of the state that HiSparse alone has."""

DEBUG = {
    "HISPARSE_DEBUG": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",  # SGLang's leak check, after every iteration too
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


@dataclass
class Output:
    """What a request has sent so far; `finished` is SGLang's reason (length, abort, ...) or None."""

    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finished: str | None = None


class EngineDied(AssertionError):
    """The scheduler stopped; the message ends with its last log lines."""


class Nursery:
    """A process that has imported SGLang, which takes 13 s of a core, and forks schedulers (`worker.nurse`)."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, str(Path(__file__).parent / "worker.py"), str(theirs.fileno())]
        environment = {**os.environ, **cpu_environment(), **DEBUG}
        # It ends when this process has closed its end of the socket.
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def fork(self, arguments: list[str], files: tuple[int, int, int]) -> int:
        """Start a scheduler with SGLang's arguments and with stdin, stdout and stderr; its process id."""
        socket.send_fds(self._socket, [json.dumps(arguments).encode()], list(files))
        answer = self._socket.recv(32)
        assert answer, "the nursery ended"
        return int(answer)


@functools.cache
def nursery() -> Nursery:
    return Nursery()


class SteppedEngine:
    """Leaving the context ends the process.

    Attributes:
        outputs: request -> what it sent. state: the scheduler's, after the last iteration (`worker.Gate._state`).
    """

    def __init__(self, model: Path, *flags: str, log: Path) -> None:
        given = ["--model-path", str(model), "--skip-tokenizer-init", *flags]
        self.arguments = [*given, *cpu_server_args(given)]
        self.log = log
        self.outputs: dict[str, Output] = {}
        self.messages: list[str] = []
        self.state: dict[str, Any] = {}

    def __enter__(self) -> SteppedEngine:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        with self.log.open("wb") as log:
            self.pid = nursery().fork(self.arguments, (commands, answers, log.fileno()))
        os.close(commands)
        os.close(answers)
        self._stdin, self._stdout = os.fdopen(self._commands, "wb"), os.fdopen(self._answers, "rb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._stdout.close()
        with suppress(BrokenPipeError):
            self._stdin.close()

    def send(self, requests: list[dict[str, Any]], steps: int, until_idle: bool) -> None:
        """Hand over requests and let the event loop run; `receive` has the answer."""
        command = {"requests": requests, "steps": steps, "until_idle": until_idle}
        try:
            self._stdin.write(json.dumps(command).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self) -> None:
        line = self._stdout.readline()
        if not line:
            raise self._died()
        answer = json.loads(line)
        self.state = answer["state"]
        self.messages = answer["messages"]
        for sent in answer["outputs"]:
            output = self.outputs.setdefault(sent["rid"], Output())
            output.output_ids += sent["output_ids"]
            output.cached_tokens = max(output.cached_tokens, sent["cached_tokens"])
            output.finished = sent["finished"]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def _died(self) -> EngineDied:
        return EngineDied(f"the scheduler ended:\n{self.log_text()[-6000:]}")


class SteppedPair:
    """HiSparse on and off, given the same at the same iterations; after every call both must be in the same state."""

    def __init__(self, on: SteppedEngine, off: SteppedEngine) -> None:
        self.on, self.off = on, off
        self.retracted_before = on.state["retracted"]  # the count at the last `start_over`
        self.usable = True  # until one of them dies or they differ
        self._next_rid = 0
        self._pending: list[dict[str, Any]] = []

    def submit(self, input_ids: list[int], max_new_tokens: int) -> str:
        """Send a request with the next iteration; its id."""
        rid = f"r{self._next_rid}"
        self._next_rid += 1
        self._pending.append({"kind": "generate", "rid": rid, "input_ids": input_ids, "max_new_tokens": max_new_tokens})
        return rid

    def abort(self, rid: str) -> None:
        self._pending.append({"kind": "abort", "rid": rid})

    def step(self, steps: int = 1) -> dict[str, Any]:
        """Let both run some iterations; the state both are in."""
        return self._run(steps, until_idle=False)

    def finish(self) -> dict[str, Any]:
        """Let both run until nothing is left to do; nothing may be lost then, and the checks must have run."""
        before = self.on.state
        state = self._run(STUCK, until_idle=True)
        assert state["idle"], f"never idle: {state}"
        assert state["free_tokens"] + state["evictable_tokens"] == state["max_total_tokens"], state
        assert state["free_requests"] == REGIONS, state
        for count in ("idle_checks", "integrity_checks"):
            assert state[count] > before[count], f"no {count} in {state}"
        return state

    def until(self, reached: Callable[[dict[str, Any]], bool], at_most: int = 200) -> dict[str, Any]:
        """Let both run until the state they are in is the one waited for."""
        for _ in range(at_most):
            state = self.step()
            if reached(state):
                return state
        raise AssertionError(f"not reached in {at_most} iterations: {state}")

    def generate(self, *prompts: list[int], max_new_tokens: int) -> list[Output]:
        """Send the prompts together and wait for all."""
        rids = [self.submit(ids, max_new_tokens) for ids in prompts]
        self.finish()
        return [self.output(rid) for rid in rids]

    def flush(self) -> bool:
        """SGLang's /flush_cache without waiting: refused unless idle. Whether it was done."""
        self._pending.append({"kind": "flush"})
        self.step()
        assert self.on.messages == self.off.messages, (self.on.messages, self.off.messages)
        return self.on.messages == ["flushed True"]

    def output(self, rid: str) -> Output:
        """What both have sent for a request so far."""
        return self.on.outputs.get(rid, Output())

    def start_over(self) -> None:
        """Empty queue and caches, forget old outputs."""
        assert self.usable
        self._pending.clear()
        for rid in self.on.state["waiting"] + self.on.state["running"] + [self.on.state["chunked"]]:
            if rid:
                self.abort(rid)
        self.finish()
        assert self.flush()
        for engine in (self.on, self.off):
            engine.outputs.clear()
        self.retracted_before = self.on.state["retracted"]

    def _run(self, steps: int, until_idle: bool) -> dict[str, Any]:
        requests, self._pending = self._pending, []
        self.usable = False
        for engine in (self.off, self.on):
            engine.send(requests, steps, until_idle)
        for engine in (self.off, self.on):
            engine.receive()
        assert self.on.state["hisparse"]["all_free_rows_are_poison"], "a read after the release would not show"
        self._compare()
        self.usable = True
        return self.on.state

    def _compare(self) -> None:
        ours, plain = ({k: v for k, v in e.state.items() if k not in OURS} for e in (self.on, self.off))
        assert ours == plain, f"on and off are in different states:\n{ours}\n{plain}"
        assert self.on.outputs.keys() == self.off.outputs.keys()
        for rid, output in self.on.outputs.items():
            assert output == self.off.outputs[rid], f"{rid} differs:\n on {output}\noff {self.off.outputs[rid]}"


def common_flags(pool_tokens: int = POOL_TOKENS) -> tuple[str, ...]:
    return (
        *("--max-total-tokens", str(pool_tokens)),
        *("--context-length", str(CONTEXT)),
        *("--max-running-requests", str(REGIONS)),
        *("--chunked-prefill-size", str(CHUNK)),
        *("--schedule-conservativeness", "0.1"),  # admit by prompt, so that decode has to retract
    )


@contextmanager
def start_stepped_pair(model: Path, logs: Path, *flags: str, pool_tokens: int = POOL_TOKENS) -> Iterator[SteppedPair]:
    """Two schedulers with tiny pools."""
    common = (*common_flags(pool_tokens), *flags)
    with ExitStack() as stack:
        on, off = (
            stack.enter_context(SteppedEngine(model, *common, *extra, log=logs / f"{name}.log"))
            for name, extra in (("on", HISPARSE_FLAGS), ("off", ()))
        )
        for engine in (on, off):
            engine.receive()
        assert on.state["hisparse"] and not off.state["hisparse"]
        yield SteppedPair(on, off)
