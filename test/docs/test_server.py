"""The server and the clients of the documentation, on the CPU: started and asked as written."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.local_server import LocalServer

from .blocks import BLOCKS, ROOT, Block, commands_of, server_flags

DOCUMENTED = "127.0.0.1:30000"
STARTS = [block for block in BLOCKS if block.mark == "server"]
CLIENTS = [
    (block, following.text if (following.language, following.page) == ("text", block.page) else "")
    for block, following in zip(BLOCKS, [*BLOCKS[1:], BLOCKS[0]], strict=True)
    if block.mark == "client"
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """The one documented server; another port and an absolute model path are all that differs."""
    (block,) = STARTS
    (command,) = commands_of(block)
    flags = server_flags(command)
    assert flags[:2] == ["--model-path", "models/needle"]
    at = flags.index("--port")
    assert flags[at + 1] == DOCUMENTED.partition(":")[2]
    more = [*flags[2:at], *flags[at + 2 :]]
    environment = {"OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with LocalServer(ROOT / "models/needle", *more, log=log, environment=environment, timeout_s=600) as running:
        yield running
        assert "fired up and ready to roll" in running.log_text()
        assert "HiSparse:" in running.log_text()


@pytest.mark.parametrize(("block", "expected"), CLIENTS, ids=lambda part: part.name if isinstance(part, Block) else "")
def test_a_client_gets_the_documented_answer(server: LocalServer, block: Block, expected: str, tmp_path: Path) -> None:
    text = block.text.replace(DOCUMENTED, server.url.removeprefix("http://"))
    command = [sys.executable, "-c", text] if block.language == "python" else ["bash", "-euc", text]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stderr}"
    assert expected.strip(), "a client without the answer to expect"
    for line in expected.strip().splitlines():
        assert line.strip() in result.stdout
