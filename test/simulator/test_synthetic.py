"""Synthetic selections: legal, reproducible, and with the hit rate they promise, counted by the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hisparse.simulator.synthetic import SyntheticSelections, shortest_prompt, with_hit_rate
from hisparse_kernel import reference

PAGE = 64


def reference_counts(made: SyntheticSelections, top_k: int, buffer: int) -> np.ndarray:
    """Tail, hit and miss entries of each step, [steps, 3], by the executable reference from a cold buffer."""
    longest = made.prompt_len + made.steps
    state = {
        "req_to_token": torch.arange(longest, dtype=torch.int32).repeat(2, 1),
        "host_rows": torch.zeros(longest, 16, dtype=torch.uint8),
        "hot_rows": torch.zeros(2 * (buffer + PAGE), 16, dtype=torch.uint8),
        "owners": torch.full((2, buffer), -1, dtype=torch.int32),
        "lru_order": torch.arange(buffer, dtype=torch.int16).repeat(2, 1),
        "tail_start": torch.full((2,), made.prompt_len, dtype=torch.int32),
    }
    counts = []
    for step, selected in enumerate(made.at()):
        counters = torch.zeros(3, dtype=torch.int64)
        reference.swap_in(
            selected=torch.from_numpy(selected)[None],
            seq_lens=torch.tensor([made.prompt_len + step + 1]),
            req_pool_indices=torch.tensor([1]),
            num_real_reqs=torch.tensor([1], dtype=torch.int32),
            page_size=PAGE,
            out=torch.empty(1, top_k, dtype=torch.int32),
            counters=counters,
            **state,
        )
        counts.append(counters.tolist())
    return np.array(counts)


@pytest.mark.parametrize("hit_rate", (0.5, 0.8, 0.9, 0.95, 0.973, 1.0))
@pytest.mark.parametrize("buffer", (256, 512, 768))
def test_the_reference_sees_the_hit_rate(hit_rate: float, buffer: int) -> None:
    prompt_len = shortest_prompt(top_k=256, buffer=buffer, hit_rate=hit_rate)
    made = with_hit_rate(top_k=256, buffer=buffer, hit_rate=hit_rate, prompt_len=prompt_len, steps=200, seed=1)
    counts = reference_counts(made, 256, buffer)
    assert counts[0].tolist() == [1, 0, 255]  # cold, but for the step's own token
    missed = counts[1:, reference.MISS] / 256
    assert abs(1 - missed.mean() - hit_rate) < 0.002
    assert np.ptp(missed) <= 1 / 256, "every step misses the same share"


@pytest.mark.parametrize("hit_rate", (0.8, 0.9, 0.95))
def test_also_at_the_size_of_real_models(hit_rate: float) -> None:
    made = with_hit_rate(top_k=2048, buffer=4096, hit_rate=hit_rate, prompt_len=32_768, steps=40, seed=(7, 3))
    counts = reference_counts(made, 2048, 4096)[1:]
    assert abs(1 - counts[:, reference.MISS].sum() / counts.sum() - hit_rate) < 0.001


def test_a_smaller_buffer_sees_the_same_rate() -> None:
    made = with_hit_rate(top_k=256, buffer=1024, hit_rate=0.9, prompt_len=2000, steps=150, seed=2)
    for buffer in (256, 512, 1024):
        counts = reference_counts(made, 256, buffer)[1:]
        assert abs(1 - counts[:, reference.MISS].sum() / counts.sum() - 0.9) < 0.002


def test_positions_are_distinct_and_exist() -> None:
    made = with_hit_rate(top_k=256, buffer=512, hit_rate=0.8, prompt_len=1000, steps=300, seed=3)
    selected = made.at()
    assert selected.dtype == np.int32 and selected.shape == (300, 256)
    assert (selected >= 0).all() and (selected <= 1000 + np.arange(300)[:, None]).all()
    assert (np.diff(np.sort(selected, axis=1), axis=1) > 0).all()
    assert (selected == 1000 + np.arange(300)[:, None]).any(axis=1).all(), "a step selects its own token"


def test_a_part_of_the_steps_equals_that_part_of_all() -> None:
    made = with_hit_rate(top_k=64, buffer=128, hit_rate=0.9, prompt_len=500, steps=50, seed=4)
    assert np.array_equal(made.at(slice(10, 20)), made.at()[10:20])
    assert np.array_equal(made.at(np.array([3, 49])), made.at()[[3, 49]])


def test_the_seed_decides() -> None:
    def make(seed: int | tuple[int, ...]) -> np.ndarray:
        return with_hit_rate(top_k=64, buffer=128, hit_rate=0.9, prompt_len=500, steps=9, seed=seed).at()

    assert np.array_equal(make((1, 2)), make((1, 2)))
    assert not np.array_equal(make((1, 2)), make((1, 3)))


@pytest.mark.parametrize(
    ("changed", "named"),
    (
        ({"top_k": 300}, "top_k=300 must be from 1 to buffer=256"),
        ({"hit_rate": 1.1}, "hit_rate=1.1"),
        ({"hit_rate": 0.01}, "recent / top_k"),
        ({"recent": 65}, "recent=65 must be from 0 to 64"),
        ({"prompt_len": 300}, "prompt_len=300 is too short"),
    ),
)
def test_what_cannot_be_is_refused(changed: dict[str, float], named: str) -> None:
    good = {"top_k": 128, "buffer": 256, "hit_rate": 0.9, "prompt_len": 1000, "steps": 5, "seed": 1}
    with pytest.raises(ValueError, match=named):
        with_hit_rate(**{**good, **changed})  # type: ignore[arg-type]
