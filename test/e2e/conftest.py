"""Servers shared by the end-to-end tests; each takes many seconds to start on a small machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.cpu.checkpoint import make_checkpoint

from .pair import INDEX_TOPK, Pair, start_pair


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights whose selection jumps about: most selected rows miss a small hot buffer."""
    directory = tmp_path_factory.mktemp("plain")
    make_checkpoint(directory, style="plain", layers=2, index_topk=INDEX_TOPK)
    return directory


@pytest.fixture(scope="session")
def conditioned_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights whose selections overlap from step to step, as a trained model's do."""
    directory = tmp_path_factory.mktemp("conditioned")
    make_checkpoint(directory, style="conditioned", layers=2, index_topk=INDEX_TOPK)
    return directory


@pytest.fixture(scope="session")
def shared_pair(plain_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with start_pair(plain_checkpoint, tmp_path_factory.mktemp("logs"), "--max-total-tokens", "32768") as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The shared servers with empty caches; checked after every test."""
    shared_pair.flush()
    yield shared_pair
    shared_pair.check()
