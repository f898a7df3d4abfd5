"""The paged buffer of indexer keys, and reading and writing it by slot.

One page is one row of a uint8 tensor ``[pages, page_size * (head_dim + 4)]``: first the float8_e4m3fn keys of its
tokens, then their float32 scales. The two planes of a page lie apart, so a token is not one contiguous piece.
"""

from typing import Any

import torch

SCALE_BYTES = 4


def planes(buffer: torch.Tensor, page_size: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the two planes of whole pages: keys ``[pages, page_size, head_dim]`` and scales ``[pages, page_size,
    4]``, uint8.
    """
    pages = buffer.shape[0]
    width = page_size * (head_dim + SCALE_BYTES)
    assert buffer.dim() == 2 and buffer.shape[1] == width, (
        f"index buffer is {tuple(buffer.shape)}, expected [*, {width}]"
    )
    key_bytes = page_size * head_dim
    return (
        buffer[:, :key_bytes].view(pages, page_size, head_dim),
        buffer[:, key_bytes:].view(pages, page_size, SCALE_BYTES),
    )


def set_k_and_s(
    pool: Any, buf: torch.Tensor, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
) -> None:
    """Write keys and scales at slots. Stands in for SGLang's ``SetKAndS.triton``.

    Args:
        pool: gives ``page_size``.
        buf: the layer's buffer, see the module.
        loc: ``[tokens]`` integer slots.
        index_k: ``[tokens, head_dim]`` float8_e4m3fn.
        index_k_scale: ``[tokens]`` or ``[tokens, 1]`` float32.
    """
    keys, scales = planes(buf, pool.page_size, index_k.shape[-1])
    page, offset = loc.long() // pool.page_size, loc.long() % pool.page_size
    keys[page, offset] = index_k.view(torch.uint8)
    scales[page, offset] = index_k_scale.float().reshape(-1).contiguous().view(torch.uint8).view(-1, SCALE_BYTES)


def get_k_and_s(
    pool: Any,
    buf: torch.Tensor,
    page_indices: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    seq_len_sum: int,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the keys and scales of whole requests, one after another. Stands in for SGLang's ``GetKAndS.triton``.

    Args:
        pool: gives ``page_size`` and ``index_head_dim``.
        buf: the layer's buffer, see the module.
        page_indices: ``[requests, pages]`` page of each request's i-th page; entries past its length are not read.
        seq_len_tensor: ``[requests]`` tokens of each request.
        seq_len_sum: their sum.
        max_seq_len: not needed here.

    Returns:
        ``(keys [seq_len_sum, head_dim], scales [seq_len_sum, 4])``, uint8.
    """
    keys, scales = [], []
    for pages, length in zip(page_indices, seq_len_tensor.tolist(), strict=True):
        k, s = read_pages(buf, pages, length, pool.page_size, pool.index_head_dim)
        keys.append(k)
        scales.append(s)
    return torch.cat(keys), torch.cat(scales)


def read_pages(
    buf: torch.Tensor, pages: torch.Tensor, length: int, page_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[length, head_dim]`` and scales ``[length, 4]``, uint8, of the first ``length`` tokens in ``pages``."""
    used = -(-length // page_size)
    # Whole pages first: selecting from the planes would copy token by token.
    keys, scales = planes(buf.index_select(0, pages[:used]), page_size, head_dim)
    return keys.reshape(-1, head_dim)[:length], scales.reshape(-1, SCALE_BYTES)[:length]
