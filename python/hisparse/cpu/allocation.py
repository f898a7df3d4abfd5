"""The paged slot allocator's two device kernels, on tensors.

SGLang's allocator takes pages from the front of ``free_pages``, in order; a request first fills its last, partly used
page.
"""

from typing import Any

import torch


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """Slots for positions ``prefix_len .. seq_len - 1`` of every request, one request after another.

    Args:
        prefix_lens: ``[requests]`` int64 tokens that have slots.
        seq_lens: ``[requests]`` int64 tokens that must have slots afterwards.
        last_slots: ``[requests]`` int64 slot of token ``prefix_len - 1``; not read where the prefix ends on a page
            boundary.
        free_pages: free page ids, enough of them.
        page_size: tokens a page.
        num_tokens: sum of ``seq_lens - prefix_lens``.

    Returns:
        ``[num_tokens]`` int64.
    """
    new = seq_lens - prefix_lens
    request = torch.repeat_interleave(torch.arange(len(new)), new, output_size=num_tokens)
    prefix = prefix_lens[request]
    position = torch.arange(num_tokens) - (torch.cumsum(new, 0) - new)[request] + prefix

    pages_before, pages_after = pages_for(prefix_lens, page_size), pages_for(seq_lens, page_size)
    taken = pages_after - pages_before
    first_taken = torch.cumsum(taken, 0) - taken  # the request's first page in free_pages
    nth_new_page = position // page_size - pages_before[request]  # negative: still in the page of the prefix

    in_old_page = last_slots[request] + 1 + position - prefix
    if len(free_pages) == 0:
        return in_old_page
    page = free_pages[(first_taken[request] + nth_new_page).clamp(0, len(free_pages) - 1)]
    return torch.where(nth_new_page < 0, in_old_page, page * page_size + position % page_size)


def pages_for(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages that hold so many tokens."""
    return (tokens + page_size - 1) // page_size


def alloc_extend(
    self: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    """``PagedTokenToKVPoolAllocator.alloc_extend``: slots for a prefill batch, or None (nothing taken) if pages are
    short.
    """
    if num_new_pages is None:
        num_new_pages = int(
            (pages_for(seq_lens_cpu, self.page_size) - pages_for(prefix_lens_cpu, self.page_size)).sum()
        )
    if self.need_sort and num_new_pages > len(self.free_pages):
        self.merge_and_sort_free()
    if num_new_pages > len(self.free_pages):
        return None
    slots = extend_slots(
        prefix_lens.long(), seq_lens.long(), last_loc.long(), self.free_pages, self.page_size, extend_num_tokens
    )
    self.free_pages = self.free_pages[num_new_pages:]
    return slots


def alloc_decode(
    self: Any, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
) -> torch.Tensor | None:
    """``PagedTokenToKVPoolAllocator.alloc_decode``: one slot for each request's token ``seq_len - 1``, or None."""
    return alloc_extend(self, seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))
