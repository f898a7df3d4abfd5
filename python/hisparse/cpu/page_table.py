"""Turning positions into slots."""

from typing import Any

import torch


def decode_slots(page_table: torch.Tensor, topk_indices: torch.Tensor, page_size: int = 1, **_: Any) -> torch.Tensor:
    """Slots of the selected positions, one row of the page table per query.

    Args:
        page_table: ``[rows, width]`` int32, slot of each position.
        topk_indices: ``[rows, top_k]`` int32 positions, -1 = none.
        page_size: SGLang passes 1 here: the table has one entry a token.

    Returns:
        ``[rows, top_k]`` int32 slots, -1 where the position was -1.
    """
    assert page_size == 1, f"page table with one entry per {page_size} tokens"
    slots = torch.gather(page_table, 1, topk_indices.clamp_min(0).long())
    return torch.where(topk_indices >= 0, slots, -1).to(torch.int32)


def prefill_slots(
    page_table: torch.Tensor,
    topk_indices: torch.Tensor,
    extend_lens_cpu: list[int],
    page_size: int = 1,
    output_num_tokens: int | None = None,
    page_table_is_expanded: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Slots of the selected positions when request ``i`` has ``extend_lens_cpu[i]`` queries.

    Args:
        page_table: ``[requests, width]`` int32, or ``[queries, width]`` if ``page_table_is_expanded``.
        topk_indices: ``[rows, top_k]`` int32 positions, -1 = none; rows past the queries are padding.
        extend_lens_cpu: queries of each request.
        page_size: 1, see :func:`decode_slots`.
        output_num_tokens: rows of the result, at least those of ``topk_indices``.

    Returns:
        ``[output_num_tokens, top_k]`` int32 slots; -1 where the position was -1 and in padding rows.
    """
    queries = sum(extend_lens_cpu)
    rows = topk_indices.shape[0] if output_num_tokens is None else output_num_tokens
    assert queries <= topk_indices.shape[0] <= rows, (
        f"{queries} queries, {topk_indices.shape[0]} selections, {rows} rows"
    )
    out = torch.full((rows, topk_indices.shape[1]), -1, dtype=torch.int32)
    if page_table_is_expanded:
        out[:queries] = decode_slots(page_table[:queries], topk_indices[:queries], page_size)
        return out
    first = 0
    for i, n in enumerate(extend_lens_cpu):
        table = page_table[i].expand(n, -1)
        out[first : first + n] = decode_slots(table, topk_indices[first : first + n], page_size)
        first += n
    return out


def last_slot(
    req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor
) -> torch.Tensor:
    """Slot of each request's last prefix token, -1 without a prefix. Stands in for SGLang's ``get_last_loc``.

    Args:
        req_to_token: ``[requests, context]`` int32 slots.
        req_pool_indices_tensor: ``[batch]`` rows of it.
        prefix_lens_tensor: ``[batch]`` prefix tokens.
    """
    slots = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp_min(0)]
    return torch.where(prefix_lens_tensor > 0, slots.to(prefix_lens_tensor.dtype), -1)
