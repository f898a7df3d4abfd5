"""Top-k positions by indexer logit, the same for the same logits whatever else is in the batch."""

from typing import Any

import torch

_MINUS_INFINITY = -(2**31) + 0x7FFFFF
"""The integer that :func:`_ordered` makes of -inf."""


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
    column = torch.arange(width)
    if row_starts is None:
        outside = column >= lengths.unsqueeze(1)
    else:
        outside = (column < row_starts.unsqueeze(1)) | (column >= (row_starts + lengths).unsqueeze(1))
    key = _ordered((logits + 0.0).masked_fill_(outside, float("-inf"))).long()  # + 0.0: makes -0.0 tie with 0.0
    key = key.bitwise_left_shift_(32).add_(2**31 - column)  # all columns fit 31 bits

    best, where = torch.topk(key, k, dim=-1, sorted=False)
    absent = best.bitwise_right_shift_(32) <= _MINUS_INFINITY
    position = where if row_starts is None else where - row_starts.unsqueeze(1)
    ordered = position.masked_fill(absent, width).sort(-1).values  # the absent behind every position
    out[:, :k] = torch.where(ordered == width, -1, ordered).to(torch.int32)
    return out


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, written over them: int32 for float32. Negative floats have their magnitude
    inverted.
    """
    bits = x.view(torch.int32)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))


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
