"""A server of ours as a context manager, for the demo, the tests and the benchmarks."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PORTS: Sequence[int] = range(20_000, 32_000)
"""Below those that the system hands out by itself (Linux: from 32,768): SGLang also listens some hundred ports above
its own, and waits in vain where another process has been given one of these."""


class ServerDied(RuntimeError):
    """The server stopped, or did not become ready in time; the message ends with its last log lines."""


class LocalServer:
    """`hisparse serve` on a free port of the loopback interface.

    Leaving the context ends the server and all its processes.

    Args:
        model: checkpoint directory.
        flags: SGLang flags behind --model-path, --host and --port.
        log: file that receives the server's output.
        environment: variables added to this process's.
        timeout_s: how long to wait until the server is ready.
        launcher: arguments of the Python interpreter that start a server.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300,
        launcher: Sequence[str] = ("-m", "hisparse.cli", "serve"),
    ) -> None:
        self.log = log
        self.timeout_s = timeout_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, *launcher, "--model-path", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalServer:
        self.start()
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; `wait` for it to serve."""
        with self.log.open("wb") as log:
            # A session of its own, so that the scheduler and detokenizer end with it.
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        self._deadline = time.monotonic() + self.timeout_s

    def wait(self) -> None:
        """Return when the server answers. Stops it and raises `ServerDied` if it ends or is not ready in time."""
        try:
            while not self._ready():
                if not self.alive or time.monotonic() > self._deadline:
                    raise ServerDied(f"{' '.join(self.command)}\n{self.log_tail()}")
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ask the server to end, then make sure that no process of its session is left."""
        process = self._process
        if process is None:
            return
        # The launcher first: it takes a child that ends before it for a crash, and spends seconds on diagnostics.
        for end, sign, patience_s in (
            (os.kill, signal.SIGTERM, 10),
            (os.killpg, signal.SIGTERM, 10),
            (os.killpg, signal.SIGKILL, 10),
        ):
            try:
                end(process.pid, sign)
                process.wait(patience_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process = None

    @property
    def pid(self) -> int:
        """The launcher's; scheduler and detokenizer are its children."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def post(self, path: str, body: Any = None, timeout_s: float = 600) -> Any:
        """POST a JSON body; the parsed answer, or its text. Raises `urllib.error.HTTPError` for a 4xx or 5xx."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method="POST")
        return _parsed(request, timeout_s)

    def get(self, path: str, timeout_s: float = 60) -> Any:
        return _parsed(urllib.request.Request(self.url + path), timeout_s)

    def generate(self, prompts: list[list[int]] | list[str], **sampling: Any) -> list[dict[str, Any]]:
        """SGLang's /generate with several prompts in one request, so that the batch's composition is fixed.

        Args:
            prompts: token ids or texts. sampling: sampling parameters; temperature is 0 unless given.
        """
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        return self.post("/generate", {key: prompts, "sampling_params": {"temperature": 0, **sampling}})

    def hisparse_state(self) -> dict[str, Any] | None:
        """The `hisparse` entry of /server_info, None where HiSparse is off."""
        return self.get("/server_info")["internal_states"][0].get("hisparse")

    def hisparse_states(self) -> list[dict[str, Any]]:
        """Likewise for each data-parallel rank, in their order; SGLang's is that in which they answer."""
        states = [inside["hisparse"] for inside in self.get("/server_info")["internal_states"]]
        return sorted(states, key=lambda state: state["dp_rank"])

    def running_requests(self) -> int:
        """Requests that run or wait; the scheduler publishes the number every few steps, and when it becomes idle."""
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in self.get("/v1/loads")["loads"])

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


def free_port() -> int:
    """One of `PORTS` that nobody listens on; raises OSError if there is none."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"no port from {min(PORTS)} to {max(PORTS)} is free")


def _parsed(request: urllib.request.Request, timeout_s: float) -> Any:
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
