"""A host pool that runs out in the middle of decode: requests are retracted, everything finishes, nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .pair import Pair, prompt, start_pair

POOL_TOKENS = 1536


@pytest.fixture(scope="module")
def small_pair(conditioned_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with start_pair(
        conditioned_checkpoint,
        tmp_path_factory.mktemp("small"),
        *("--max-total-tokens", str(POOL_TOKENS)),
        *("--schedule-conservativeness", "0.1"),  # admit by prompt, so that decode has to retract
    ) as pair:
        yield pair


def test_retraction_when_the_pool_runs_out(small_pair: Pair) -> None:
    """FIELD F2, F3: six requests are admitted by their prompts and outgrow the pool together."""
    lengths = [100, 150, 200, 250, 300, 120]
    prompts = [prompt(200 + i, n) for i, n in enumerate(lengths)]
    assert sum(lengths) < POOL_TOKENS < sum(lengths) + 6 * 300
    small_pair.generate(prompts, max_new_tokens=300)
    for server in (small_pair.on, small_pair.off):
        assert "Retract requests" in server.log_text()


def test_more_requests_than_regions_wait(small_pair: Pair) -> None:
    """FIELD F15: twelve requests, eight regions."""
    small_pair.generate([prompt(500 + i, 20 + 11 * i) for i in range(12)], max_new_tokens=40)
