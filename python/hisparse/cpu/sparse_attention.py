"""Latent (MLA) attention over selected rows."""

from typing import Any

import torch

from hisparse.cpu.scratch import rows_per_block


def sparse_attention(
    queries: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """Softmax attention of each query over the rows it names, added up in the order it names them.

    What lies behind a -1, or in a row that nobody names, never enters the arithmetic, not even as a factor of zero (0 *
    NaN is NaN). A NaN in a named row shows in the output. Row ids do not influence the result, only the rows' contents
    do.

    Args:
        queries: ``[tokens, heads, d]``.
        rows: ``[slots, d]`` or ``[slots, 1, d]``; key and value share a row, the value is its leading ``value_dim``
            values.
        indices: ``[tokens, top_k]`` integer rows, -1 = none.
        scale: factor of the scores.
        value_dim: values of a head's output.

    Returns:
        ``[tokens, heads, value_dim]`` in the queries' dtype, computed in float32; zeros where a token names no row.
    """
    tokens, heads, d = queries.shape
    top_k = indices.shape[1]
    rows = rows.reshape(-1, rows.shape[-1])
    out = torch.empty(tokens, heads, value_dim, dtype=queries.dtype)
    # Gathered rows twice (as stored, as float32), scores twice (before and after the softmax), query and output in
    # float32.
    bytes_per_token = top_k * (d * (rows.element_size() + 4) + heads * 8) + heads * (d + value_dim) * 4
    step = rows_per_block(bytes_per_token)
    for first in range(0, tokens, step):
        block = slice(first, first + step)
        out[block] = _attend(queries[block], rows, indices[block], scale, value_dim)
    return out


def _attend(
    queries: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, scale: float, value_dim: int
) -> torch.Tensor:
    tokens, top_k = indices.shape
    absent = indices < 0
    gathered = rows.index_select(0, indices.clamp_min(0).reshape(-1)).float().view(tokens, top_k, -1)
    some_absent = bool(absent.any())
    if some_absent:
        gathered.masked_fill_(absent.unsqueeze(-1), 0.0)
    scores = torch.bmm(queries.float() * scale, gathered.transpose(1, 2))
    if some_absent:
        # A token that names nothing keeps its scores: any weights will do, all its values are zero.
        masked = absent & ~absent.all(-1, keepdim=True)
        scores.masked_fill_(masked.unsqueeze(1), float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, gathered[..., :value_dim]).to(queries.dtype)


def forward_flashmla_sparse(
    self: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
) -> torch.Tensor:
    """``DeepseekSparseAttnBackend._forward_flashmla_sparse`` without the GPU kernel's padding to 64 heads.

    ``topk_length`` only lets the GPU kernel skip trailing -1, so it is not needed.
    """
    return sparse_attention(q_all, kv_cache, page_table_1, sm_scale, v_head_dim)
