"""A plug-in of SGLang for the benchmarks of needle. With NEEDLE_DENSE=1 in the environment, attend to everything at a
bearable price (see `dense_attention`).
"""

from __future__ import annotations

import itertools
import os

import torch

QUERIES_A_BLOCK = 256


def register() -> None:
    if os.environ.get("NEEDLE_DENSE") == "1":
        import hisparse.cpu.sparse_attention as room

        room.sparse_attention = dense_attention


def dense_attention(
    queries: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, scale: float, value_dim: int
) -> torch.Tensor:
    """`hisparse.cpu.sparse_attention.sparse_attention` for a selection that leaves nothing out.

    Where index_topk is as large as the context, query t names the rows of positions 0..t, and the product gathers them
    anew for each query. Here they are gathered once for all queries of one request, and later positions masked. The
    sums are the same, in another order. Any selection whose -1 come last (checked) is attended to rightly, but only
    this kind at this price.

    Args, returns: as there; float32 inside, as there.
    """
    tokens, heads, _ = queries.shape
    rows = rows.reshape(-1, rows.shape[-1])
    lens = (indices >= 0).sum(-1)
    # A request's next query names what the one before it names, and one row more. Elsewhere a new request begins.
    goes_on = ((indices[1:] == indices[:-1]) | (indices[:-1] < 0)).all(-1) & (lens[1:] == lens[:-1] + 1)
    ends = [*(goes_on.logical_not().nonzero().flatten() + 1).tolist(), tokens]
    out = torch.zeros(tokens, heads, value_dim, dtype=queries.dtype)
    for first, last in itertools.pairwise([0, *ends]):
        named = indices[last - 1, : lens[last - 1]]
        assert bool((named >= 0).all()), "a selection has a -1 before its end"
        seen = torch.arange(len(named)) < lens[first:last, None]
        expected = torch.where(seen, named, -1)
        assert torch.equal(indices[first:last, : len(named)], expected), "queries of one request name different rows"
        keys = rows[named.long()].float()
        for start in range(first, last, QUERIES_A_BLOCK):
            block = slice(start, min(start + QUERIES_A_BLOCK, last))
            length = int(lens[block.stop - 1])
            if length == 0:  # padding
                continue
            scores = torch.matmul(queries[block].float() * scale, keys[:length].T)
            scores.masked_fill_(~seen[block.start - first : block.stop - first, None, :length], float("-inf"))
            out[block] = torch.matmul(torch.softmax(scores, -1), keys[:length, :value_dim]).to(queries.dtype)
    return out
