"""Keeps the pages of a request together in the host pool.

Swap-in reads a request's rows from host memory, and neighbouring rows are cheaper to read (address translation; figures
in docs/benchmarks.md). SGLang's allocator hands pages out in the order in which they were freed, so after a few hundred
requests of mixed length every second page begins a new stretch. Ordering the free pages by the length of the stretch
they lie in, whenever a prompt asks for some after others were freed, keeps prompts in a few long stretches.
"""

from __future__ import annotations

from typing import Any

import torch


def pages_released(allocator: Any) -> None:
    """Remember that an allocator's free pages are out of order."""
    allocator.hisparse_unordered = True


def order_free_pages(allocator: Any) -> None:
    """Put the free pages of an allocator in order if some were released since the last time. No wait for the device."""
    if getattr(allocator, "hisparse_unordered", False):
        allocator.free_pages = longest_runs_first(allocator.free_pages)
        allocator.hisparse_unordered = False


def longest_runs_first(pages: torch.Tensor) -> torch.Tensor:
    """Distinct page numbers, int64 [n], ordered by the length of the run of neighbours that a page belongs to, longest
    first; runs of the same length, and pages within a run, in ascending order.
    """
    ordered = pages.sort().values
    begins = torch.ones_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1] + 1
    run = begins.cumsum(0) - 1
    lengths = torch.zeros_like(ordered).scatter_add_(0, run, torch.ones_like(ordered))
    return ordered[lengths[run].argsort(descending=True, stable=True)]
