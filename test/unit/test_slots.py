"""Free pages in long stretches first."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.plugin.slots import longest_runs_first, order_free_pages, pages_released


def runs_of(pages: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and runs[-1][-1] == page - 1:
            runs[-1].append(page)
        else:
            runs.append([page])
    return sorted(runs, key=lambda run: (-len(run), run[0]))


@given(st.sets(st.integers(1, 60)).flatmap(lambda pages: st.permutations(sorted(pages))))
def test_longest_runs_first(pages: list[int]) -> None:
    expected = [page for run in runs_of(pages) for page in run]
    assert longest_runs_first(torch.tensor(pages, dtype=torch.int64)).tolist() == expected


def test_free_pages_are_ordered_only_after_some_were_released() -> None:
    allocator = SimpleNamespace(free_pages=torch.tensor([9, 2, 3]))
    order_free_pages(allocator)
    assert allocator.free_pages.tolist() == [9, 2, 3]
    pages_released(allocator)
    order_free_pages(allocator)
    assert allocator.free_pages.tolist() == [2, 3, 9]
    allocator.free_pages = torch.tensor([9, 3])
    order_free_pages(allocator)
    assert allocator.free_pages.tolist() == [9, 3]
