"""Every planted fault changes the tokens: the equality tests would notice it. No poison and no verification here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hisparse.cpu.checkpoint import make_checkpoint
from hisparse.local_server import LocalServer

from ..e2e.pair import FLAGS, FORKED, HISPARSE_FLAGS, INDEX_TOPK, prompt

FAULTS_FOLDER = Path(__file__).parent / "faults"
sys.path.insert(0, str(FAULTS_FOLDER))
from hisparse_faults import FAULTS  # noqa: E402


class Breakable(NamedTuple):
    server: LocalServer
    fault: Path


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    directory = tmp_path_factory.mktemp("mutation")
    make_checkpoint(directory / "model", style="plain", layers=2, index_topk=INDEX_TOPK)
    fault = directory / "fault"
    fault.write_text("")
    environment = {
        "HISPARSE_FAULT_FILE": str(fault),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FAULTS_FOLDER), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    flags = (*FLAGS, *HISPARSE_FLAGS, "--max-total-tokens", "16384")
    with LocalServer(
        directory / "model", *flags, log=directory / "log", environment=environment, launcher=FORKED
    ) as server:
        yield Breakable(server, fault)


def run(server: LocalServer) -> list[list[int]]:
    """Two batches after each other in the same regions, the first long enough to evict generated rows."""
    tokens = []
    for batch, new in (([prompt(1, 30), prompt(2, 700)], 230), ([prompt(3, 400), prompt(4, 90)], 60)):
        server.post("/flush_cache?timeout=30")
        tokens += [a["output_ids"] for a in server.generate(batch, max_new_tokens=new, ignore_eos=True)]
    return tokens


@pytest.fixture(scope="module")
def healthy(breakable: Breakable) -> list[list[int]]:
    expected = run(breakable.server)
    assert run(breakable.server) == expected, "the healthy server does not repeat itself"
    return expected


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_changes_the_tokens(breakable: Breakable, healthy: list[list[int]], fault: str) -> None:
    breakable.fault.write_text(fault)
    try:
        assert run(breakable.server) != healthy
    finally:
        breakable.fault.write_text("")


def test_the_server_is_healthy_again(breakable: Breakable, healthy: list[list[int]]) -> None:
    """No fault outlived its removal, so each was noticed by itself."""
    assert run(breakable.server) == healthy
