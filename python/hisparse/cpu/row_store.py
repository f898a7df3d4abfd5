"""Writing rows into a KV pool."""

import torch


def set_rows(
    kv_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
) -> None:
    """Write ``nope | rope`` into the pool's rows. Stands in for SGLang's ``set_mla_kv_buffer_triton``.

    Args:
        kv_buffer: ``[slots, 1, d]`` or ``[slots, d]``.
        loc: ``[tokens]`` integer slots.
        cache_k_nope: ``[tokens, 1, n]`` or ``[tokens, n]``; goes to columns ``0 .. n - 1``.
        cache_k_rope: ``[tokens, 1, r]`` or ``[tokens, r]``; goes to columns ``n .. n + r - 1``.
    """
    rows = kv_buffer.view(kv_buffer.shape[0], -1)
    nope, rope = (part.reshape(len(loc), -1).to(rows.dtype) for part in (cache_k_nope, cache_k_rope))
    n, r = nope.shape[1], rope.shape[1]
    rows[loc, :n] = nope
    rows[loc, n : n + r] = rope
