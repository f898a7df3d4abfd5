"""Indexer logits: how much each query wants each key, before top-k.

    logits[q, k] = sum_h weights[q, h] * relu(queries[q, h] . keys[k]) * key_scale[k]

(DeepSeek-V3.2 report, equation 1; the queries' own fp8 scale is already folded into ``weights``.)
"""

from typing import Any

import torch

from hisparse.cpu.index_buffer import read_pages
from hisparse.cpu.quantize import from_fp8


def mqa_logits(
    queries: torch.Tensor, keys: torch.Tensor, key_scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The formula above for one block of queries against one run of keys.

    Args:
        queries: ``[q, heads, d]`` float32, exact images of fp8 values.
        keys: ``[k, d]`` float32, likewise.
        key_scale: ``[k]`` float32.
        weights: ``[q, heads]`` float32.

    Returns:
        ``[q, k]`` float32. The caller bounds ``q``: the scratch is ``q * heads * k`` floats.
    """
    q, heads, d = queries.shape
    scores = (queries.reshape(q * heads, d) @ keys.t()).relu_().view(q, heads, -1)
    logits = torch.bmm(weights.reshape(q, 1, heads), scores)
    return logits.squeeze(1).mul_(key_scale)


def paged_mqa_logits(
    queries: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule: Any,
    max_seq_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:
    """Logits of decode queries against their own request's keys. Stands in for DeepGEMM's ``fp8_paged_mqa_logits``.

    Requests are taken one by one, so that a request's logits do not depend on the others in the batch, and keys past
    its length are never read.

    Args:
        queries: ``[requests, next_n, heads, d]`` float8_e4m3fn.
        kv_cache: ``[pages, page_size, 1, d + 4]`` uint8 view of the index buffer.
        weights: ``[requests * next_n, heads]`` float32.
        context_lens: ``[requests]``, ``[requests, 1]`` or ``[requests, next_n]``: keys that each query sees.
        block_tables: ``[requests, pages]`` page of each request's i-th page.
        schedule: ignored; it tells the GPU kernel how to split the work.
        max_seq_len: width of the result.
        clean_logits: ignored; entries past a query's length are always -inf.

    Returns:
        ``[requests * next_n, max_seq_len]`` float32.
    """
    requests, next_n, _, d = queries.shape
    page_size = kv_cache.shape[1]
    buffer = kv_cache.view(kv_cache.shape[0], -1)
    queries, weights = from_fp8(queries), weights.float().view(requests, next_n, -1)
    lengths = context_lens.reshape(requests, -1).expand(requests, next_n).tolist()
    out = torch.full((requests, next_n, max_seq_len), float("-inf"))
    for b, request_lengths in enumerate(lengths):
        longest = max(request_lengths)
        if longest <= 0:
            continue
        keys, scale = read_pages(buffer, block_tables[b], longest, page_size, d)
        logits = mqa_logits(queries[b], from_fp8(keys), scale.view(torch.float32).squeeze(1), weights[b])
        for j, length in enumerate(request_lengths):
            out[b, j, :length] = logits[j, :length]
    return out.view(requests * next_n, max_seq_len)
