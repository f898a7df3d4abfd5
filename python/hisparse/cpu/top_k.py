"""Top-k positions by indexer logit, the same for the same logits whatever else is in the batch."""

from typing import Any

import torch

_LOWEST = torch.iinfo(torch.int64).min
_POSITION_BITS = 32


def top_k_positions(
    logits: torch.Tensor, lengths: torch.Tensor, top_k: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """The ``top_k`` positions with the highest logits of each row, in ascending order.

    Equal logits (relu makes exact zeros common) go to the lower position. torch.topk breaks ties in an order that
    depends on the row's width, hence on the longest request of the batch; so logit and position are packed into one
    integer key first. Ascending order makes attention add up its terms in the same order whether a prompt came whole or
    in chunks.

    Args:
        logits: ``[rows, width]`` float32. NaN counts as larger than any number; -inf is never selected.
        lengths: ``[rows]`` positions that each row may select from.
        top_k: positions wanted.
        row_starts: ``[rows]`` column of each row's position 0; None means 0.

    Returns:
        ``[rows, top_k]`` int32, -1 where a row has no more positions; the -1 come last.
    """
    rows, width = logits.shape
    out = torch.full((rows, top_k), -1, dtype=torch.int32)
    k = min(top_k, width)
    if rows == 0 or k == 0:
        return out
    start = torch.zeros_like(lengths) if row_starts is None else row_starts
    start, end = start.long().unsqueeze(1), (start + lengths).long().unsqueeze(1)
    column = torch.arange(width)

    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, so that the two tie
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # order of the integers = order of the floats
    key = (key << _POSITION_BITS) + (2 ** (_POSITION_BITS - 1) - column)
    key.masked_fill_((column < start) | (column >= end) | (logits == float("-inf")), _LOWEST)

    best, where = torch.topk(key, k, dim=-1, sorted=False)
    nothing = torch.iinfo(torch.int64).max  # sorts behind every column
    ordered = where.masked_fill_(best == _LOWEST, nothing).sort(-1).values
    out[:, :k] = torch.where(ordered == nothing, -1, ordered - start).to(torch.int32)
    return out


def first_positions(lengths: torch.Tensor, top_k: int) -> torch.Tensor:
    """What :func:`top_k_positions` returns when no row is longer than ``top_k``: all of its positions. ``[rows,
    top_k]`` int32.
    """
    column = torch.arange(top_k, dtype=torch.int32)
    return torch.where(column < lengths.unsqueeze(1), column, -1)


def topk_unfused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
    topk_op: Any = None,
    topk_op_kwargs: Any = None,
) -> torch.Tensor:
    """:func:`top_k_positions` under the signature of SGLang's ``_topk_unfused``."""
    return top_k_positions(score, lengths, topk, row_starts)
