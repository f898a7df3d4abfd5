"""The DSA indexer's forward pass: store this step's keys, score them, select positions."""

from typing import Any

import torch

from hisparse.cpu.index_logits import mqa_logits
from hisparse.cpu.quantize import act_quant, from_fp8
from hisparse.cpu.scratch import rows_per_block
from hisparse.cpu.top_k import first_positions, top_k_positions


def ragged_top_k(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Select for the queries of several requests, whose keys lie one request after another.

    Works on blocks of queries of one request, against that request's keys up to the block's last query: memory is
    bounded, causal masking halves the work, and a request's selection does not depend on the rest of the batch.

    Args:
        queries: ``[tokens, heads, d]`` float8_e4m3fn, requests one after another, positions ascending within a request.
        weights: ``[tokens, heads]`` float32.
        keys: ``[all keys, d]`` float8_e4m3fn.
        key_scale: ``[all keys]`` float32.
        starts: ``[tokens]`` index of the first key of the query's request.
        ends: ``[tokens]`` one past the last key that the query sees.
        top_k: positions to select.

    Returns:
        ``[tokens, top_k]`` int32 positions within the request, see :func:`top_k_positions`.
    """
    tokens, heads, _ = queries.shape
    out = torch.full((tokens, top_k), -1, dtype=torch.int32)
    first = 0
    start_of, counts = torch.unique_consecutive(starts, return_counts=True)
    for start, count in zip(start_of.tolist(), counts.tolist(), strict=True):
        last = first + count
        length = int(ends[last - 1]) - start
        run_keys, run_scale = from_fp8(keys[start : start + length]), key_scale[start : start + length]
        # Scores of all heads, the logits, and top-k's packed key with its temporaries (3 x int64).
        step = rows_per_block(length * (heads * 4 + 4 + 24))
        for q in range(first, last, step):
            block = slice(q, min(q + step, last))
            seen = int(ends[block.stop - 1]) - start
            logits = mqa_logits(from_fp8(queries[block]), run_keys[:seen], run_scale[:seen], weights[block])
            out[block] = top_k_positions(logits, ends[block] - start, top_k)
        first = last
    return out


def indexer_forward(
    self: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
) -> torch.Tensor | None:
    """``Indexer.forward_native``, which SGLang leaves unimplemented.

    Args:
        x: ``[tokens, hidden]`` hidden states.
        q_lora: ``[tokens, q_lora_rank]`` compressed queries.
        positions: ``[tokens]``.
        forward_batch: SGLang's ForwardBatch, for a plain prefill or decode.
        layer_id: SGLang's layer number.
        return_indices: False if only the keys need storing.

    Returns:
        ``[tokens, index_topk]`` int32 positions, or None.

    Raises:
        NotImplementedError: the batch is neither a plain prefill nor a decode step.
    """
    from sglang.srt.layers.attention.dsa import dsa_indexer

    metadata = dsa_indexer.get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    if metadata is None:
        return None
    mode = forward_batch.forward_mode
    if not (mode.is_decode_or_idle() or mode.is_extend_without_speculative()):
        raise NotImplementedError(
            f"DSA indexer on the CPU: forward mode {mode.name}; prefill and decode are implemented"
        )

    query, key, _ = self._get_q_k_bf16(q_lora, x, positions, False, forward_batch=forward_batch)
    self._store_index_k_cache(forward_batch=forward_batch, layer_id=layer_id, key=key, act_quant=act_quant)
    if not return_indices:
        return None

    lengths = metadata.get_seqlens_expanded()
    tokens = lengths.shape[0]  # x may have padding rows after them
    out = torch.full((x.shape[0], self.index_topk), -1, dtype=torch.int32)
    if tokens == 0:
        return out
    if int(lengths.max()) <= self.index_topk:
        out[:tokens] = first_positions(lengths, self.index_topk)
        return out

    query_fp8, query_scale = act_quant(query, self.block_size, self.scale_fmt)
    weights = self._get_logits_head_gate(x, query_scale)
    if mode.is_decode_or_idle():
        return self._get_topk_paged(forward_batch, layer_id, query_fp8, weights, metadata)

    pool = dsa_indexer.get_token_to_kv_pool()
    seq_lens_cpu = metadata.get_indexer_seq_len_cpu()
    keys, key_scale = pool.get_index_k_scale_buffer(
        layer_id,
        metadata.get_indexer_seq_len(),
        metadata.get_page_table_64(),
        int(seq_lens_cpu.sum()),
        int(seq_lens_cpu.max()),
    )
    starts, ends = metadata.get_indexer_kvcache_range()
    out[:tokens] = ragged_top_k(
        query_fp8[:tokens],
        weights[:tokens].squeeze(-1),
        keys.view(torch.float8_e4m3fn),
        key_scale.view(torch.float32).squeeze(-1),
        starts,
        ends,
        self.index_topk,
    )
    return out
