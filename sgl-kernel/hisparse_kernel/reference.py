"""Executable reference of the data plane, and its CPU back end: plain torch, any device, no state of its own.

All functions change their tensor arguments in place and take keyword arguments only. The CUDA functions have the
same names and signatures; `test/kernel` holds both to the same results, bit for bit.

Words (docs/architecture.md): a request's *region* of the hot buffer is `device_buffer_size` LRU rows followed by
`page_size` tail rows. Region r starts at hot row `r * (device_buffer_size + page_size)`; r is SGLang's
`req_pool_idx`, and region 0 is never a request's (SGLang pads batches with it).
"""

from __future__ import annotations

import torch

from hisparse.row_format import RowFormat

TAIL, HIT, MISS = 0, 1, 2
"""Columns of `counters`. Every entry of a selection that gets a row is exactly one of the three: in the tail ring;
resident before this step, or a repetition of an earlier entry; copied from the host."""


def swap_in(
    *,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    num_real_reqs: torch.Tensor,
    req_to_token: torch.Tensor,
    host_rows: torch.Tensor,
    hot_rows: torch.Tensor,
    owners: torch.Tensor,
    lru_order: torch.Tensor,
    tail_start: torch.Tensor,
    page_size: int,
    out: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Make the selected positions resident and return their hot rows (docs/architecture.md, "Swap-in").

    Args:
        selected: int32 [batch, top_k] positions in any order; negative = none. top_k <= device_buffer_size.
        seq_lens: int32 or int64 [batch], the newest token included.
        req_pool_indices: int32 or int64 [batch], the region of each batch row; distinct among real rows.
        num_real_reqs: int32 [1]; batch rows from here on are padding and get -1.
        req_to_token: int32 [regions, max_context], the slot of each position of each request.
        host_rows: uint8 [slots, row_bytes], this layer's part of the host pool.
        hot_rows: uint8 [regions * region_rows, row_bytes], this layer's hot buffer.
        owners: int32 [regions, device_buffer_size], the position each LRU row holds, -1 = empty.
        lru_order: int16 [regions, device_buffer_size], LRU rows from least to most recently used.
        tail_start: int32 [regions], first position of the request that was written to the tail ring.
        page_size: rows in the tail ring.
        out: int32 [batch, top_k], receives hot rows; -1 for no position, one out of range, or one whose slot
            lies outside the host pool (then nothing is copied and the victim keeps its owner).
        counters: int64 [3], incremented by the entries of each kind (TAIL, HIT, MISS).

    Returns:
        `out`.
    """
    out.fill_(-1)
    real = int(num_real_reqs)
    if real == 0:
        return out
    device = selected.device
    regions = req_pool_indices[:real].long()
    lens = seq_lens[:real].long().unsqueeze(1)
    chosen = selected[:real].long()
    owner, order = owners[regions].long(), lru_order[regions].long()
    num_entries, num_lru_rows = chosen.shape[1], owner.shape[1]
    entry = torch.arange(num_entries, device=device).expand(real, -1)
    lru_row = torch.arange(num_lru_rows, device=device).expand(real, -1)

    valid = (chosen >= 0) & (chosen < lens)
    in_tail = valid & (chosen >= tail_start[regions].long().unsqueeze(1)) & (chosen >= lens - page_size)
    wanted = valid & ~in_tail

    # Two maps over positions; their last column takes everything that is not a wanted position.
    nowhere = int(lens.max())
    column = torch.where(wanted, chosen, nowhere)
    row_of = torch.full((real, nowhere + 1), -1, dtype=torch.long, device=device)
    row_of.scatter_(1, torch.where((owner >= 0) & (owner < nowhere), owner, nowhere), lru_row)
    first_entry = torch.full((real, nowhere + 1), num_entries, dtype=torch.long, device=device)
    first_entry.scatter_reduce_(1, column, entry, reduce="amin")

    resident_row = row_of.gather(1, column)
    hit = wanted & (resident_row >= 0)
    first = first_entry.gather(1, column)
    missing = wanted & ~hit & (first == entry)

    # Rows by recency, evictable ones first (order kept), hits behind them; the k-th miss takes the k-th row.
    hit_row = _mark(lru_row, resident_row, hit)
    recency = order.gather(1, torch.argsort(hit_row.gather(1, order).byte(), dim=1, stable=True))
    rank = (missing.cumsum(1) - 1).clamp_min(0)
    victim = recency.gather(1, rank)
    slot = req_to_token[regions.unsqueeze(1), column.clamp_max(req_to_token.shape[1] - 1)].long()
    loaded = missing & (slot >= 0) & (slot < host_rows.shape[0])

    region_start = (regions * (num_lru_rows + page_size)).unsqueeze(1)
    hot_rows[(region_start + victim)[loaded]] = host_rows[slot[loaded].to(host_rows.device)].to(hot_rows.device)
    batch_row = torch.arange(real, device=device).unsqueeze(1).expand_as(chosen)
    owner[batch_row[loaded], victim[loaded]] = chosen[loaded]
    owners[regions] = owner.int()
    loaded_place = _mark(lru_row, rank, loaded)
    age = torch.where(loaded_place, 1, torch.where(hit_row.gather(1, recency), 2, 0))
    lru_order[regions] = recency.gather(1, torch.argsort(age, dim=1, stable=True)).to(lru_order.dtype)

    # A repeated position follows its first entry, which may have found no host row.
    row = torch.where(hit, resident_row, torch.where(loaded, victim, -1))
    row = torch.where(wanted, row.gather(1, first.clamp_max(num_entries - 1)), row)
    row = torch.where(in_tail, num_lru_rows + chosen % page_size, row)
    out[:real] = torch.where(row >= 0, region_start + row, -1).int()

    served = int((wanted & (row >= 0)).sum())
    misses = int(loaded.sum())
    counters[TAIL] += int(in_tail.sum())
    counters[HIT] += served - misses
    counters[MISS] += misses
    return out


def _mark(like: torch.Tensor, index: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """bool of `like`'s shape, true at `index[b, i]` of row b wherever `where[b, i]`."""
    spare = like.shape[1]
    marks = torch.zeros((like.shape[0], spare + 1), dtype=torch.bool, device=like.device)
    return marks.scatter_(1, torch.where(where, index, spare), True)[:, :spare]


def store_decode(
    *,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    num_real_reqs: torch.Tensor,
    host_rows: torch.Tensor,
    hot_rows: torch.Tensor,
    device_buffer_size: int,
    page_size: int,
    row_format: RowFormat,
) -> None:
    """Write one new token a request through to its tail row and its host slot.

    Args:
        k_nope, k_rope: bf16 [batch, nope_dim] and [batch, rope_dim] (a middle dimension of 1 is accepted).
        slots: int32 or int64 [batch], where SGLang put each token.
        seq_lens, req_pool_indices, num_real_reqs, host_rows, hot_rows: as in `swap_in`; the token's position
            is `seq_lens - 1`, and padding rows write nothing.
    """
    real = int(num_real_reqs)
    rows = row_format.pack(k_nope[:real], k_rope[:real])
    tail_row = device_buffer_size + (seq_lens[:real].long() - 1) % page_size
    hot_rows[req_pool_indices[:real].long() * (device_buffer_size + page_size) + tail_row] = rows
    host_rows[slots[:real].long().to(host_rows.device)] = rows.to(host_rows.device)


def store_extend(
    *,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    row_ids: torch.Tensor,
    host_rows: torch.Tensor,
    workspace: torch.Tensor,
    row_format: RowFormat,
) -> None:
    """Write a chunk's tokens through to the workspace and to their host slots.

    Args:
        k_nope, k_rope: bf16 [tokens, nope_dim] and [tokens, rope_dim] (a middle dimension of 1 is accepted).
        slots: int32 or int64 [tokens]; distinct.
        row_ids: int32 or int64 [tokens], the workspace row of each token.
        host_rows: uint8 [slots, row_bytes]. workspace: uint8 [rows, row_bytes].
    """
    rows = row_format.pack(k_nope, k_rope)
    workspace[row_ids.long()] = rows
    host_rows[slots.long().to(host_rows.device)] = rows.to(host_rows.device)


def gather(*, host_rows: torch.Tensor, slots: torch.Tensor, workspace: torch.Tensor, row_ids: torch.Tensor) -> None:
    """Copy `host_rows[slots[i]]` to `workspace[row_ids[i]]`; slots and row_ids int32 or int64 [n]."""
    workspace[row_ids.long()] = host_rows[slots.long().to(host_rows.device)].to(workspace.device)


def seed(
    *,
    candidates: torch.Tensor,
    regions: torch.Tensor,
    workspace_starts: torch.Tensor,
    workspace: torch.Tensor,
    hot_rows: torch.Tensor,
    owners: torch.Tensor,
    lru_order: torch.Tensor,
    page_size: int,
) -> None:
    """Fill freshly reset regions of one layer from the workspace, so that the first decode step finds its rows.

    Args:
        candidates: int32 [n, m] positions, most wanted first; negative = none, repetitions allowed. The i-th
            distinct one goes to LRU row i until the region is full; the most wanted becomes the most recent.
        regions: int32 or int64 [n], distinct.
        workspace_starts: int32 or int64 [n]; position p of request i lies in workspace row `starts[i] + p`.
        workspace: uint8 [rows, row_bytes]. hot_rows, owners, lru_order: as in `swap_in`, one layer.
    """
    num_lru_rows = owners.shape[1]
    everyone = torch.arange(num_lru_rows, device=owners.device)
    for chosen, region, start in zip(candidates.long(), regions.tolist(), workspace_starts.tolist(), strict=True):
        chosen = chosen[chosen >= 0]
        distinct, which = torch.unique(chosen, return_inverse=True)
        first = torch.full_like(distinct, chosen.numel())
        first.scatter_reduce_(0, which, torch.arange(chosen.numel(), device=chosen.device), reduce="amin")
        positions = chosen[first.sort().values[:num_lru_rows]]
        count = positions.numel()
        region_start = region * (num_lru_rows + page_size)
        hot_rows[region_start : region_start + count] = workspace[start + positions]
        owners[region, :count] = positions.int()
        lru_order[region] = torch.cat((everyone[count:], everyone[:count].flip(0))).to(lru_order.dtype)


def reset(
    *,
    owners: torch.Tensor,
    lru_order: torch.Tensor,
    tail_start: torch.Tensor,
    regions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Forget everything the regions hold, in all layers; tokens from `seq_lens` on will go to the tail ring.

    Args:
        owners: int32 [layers, regions, device_buffer_size]. lru_order: int16, same shape.
        tail_start: int32 [regions].
        regions: int32 or int64 [n]. seq_lens: int32 or int64 [n].
    """
    regions = regions.long()
    owners[:, regions] = -1
    lru_order[:, regions] = torch.arange(lru_order.shape[-1], device=lru_order.device).to(lru_order.dtype)
    tail_start[regions] = seq_lens.to(tail_start.dtype)
