"""Schedulers shared by the tests of this folder; a start takes some ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.cpu.checkpoint import make_checkpoint

from ..e2e.pair import INDEX_TOPK
from .stepped import SteppedPair, start_stepped_pair


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights whose selection jumps about: most selected rows miss, and one wrong row changes the tokens."""
    directory = tmp_path_factory.mktemp("stepped_model")
    make_checkpoint(
        directory, style="plain", layers=2, index_topk=INDEX_TOPK, hidden=128, heads=2, index_heads=2,
        kv_lora_rank=64, q_lora_rank=64, nope_dim=32, value_dim=32, intermediate=128,
    )  # fmt: skip
    return directory


@pytest.fixture(scope="session")
def shared_stepped(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedPair]:
    with start_stepped_pair(checkpoint, tmp_path_factory.mktemp("stepped")) as pair:
        yield pair


@pytest.fixture(scope="session")
def shared_without_radix(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedPair]:
    with start_stepped_pair(checkpoint, tmp_path_factory.mktemp("no_radix"), "--disable-radix-cache") as pair:
        yield pair


@pytest.fixture
def without_radix(shared_without_radix: SteppedPair) -> SteppedPair:
    shared_without_radix.start_over()
    return shared_without_radix


@pytest.fixture
def pair(shared_stepped: SteppedPair) -> SteppedPair:
    """Two schedulers with tiny pools, idle and empty."""
    shared_stepped.start_over()
    return shared_stepped
