"""How one prefill batch goes through the workspace: which requests together, and which row is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class ExtendGroup:
    """Requests of a batch whose sequences fill the workspace together.

    Request i of the group has its positions [0, seq_len) in workspace rows [starts[i], starts[i] + seq_len): the
    prefix gathered from the host pool first, the chunk's new tokens behind it. The rows are valid for one layer,
    from that layer's gather until the next gather into the same workspace.

    Attributes:
        tokens: the group's new tokens within the batch's flat token list.
        regions: int64 [requests], `req_pool_idx` of each.
        starts: int64 [requests], first workspace row of each.
        prefix_slots: int64 [prefix tokens], host slots to gather. prefix_rows: int64, workspace rows they go to.
        new_slots: int64 [new tokens], host slots of the chunk. new_rows: int64, workspace rows of the chunk.
        token_starts: int32 [new tokens, 1], first workspace row of the request each token belongs to.
        last_tokens: int64 [requests, queries], indices into the group's tokens of each request's last queries,
            newest first; a request with fewer new tokens repeats its first.
    """

    tokens: slice
    regions: torch.Tensor
    starts: torch.Tensor
    prefix_slots: torch.Tensor
    prefix_rows: torch.Tensor
    new_slots: torch.Tensor
    new_rows: torch.Tensor
    token_starts: torch.Tensor
    last_tokens: torch.Tensor


def pack_requests(seq_lens: Sequence[int], capacity: int) -> list[range]:
    """Split a batch, in order, into runs of requests whose sequence lengths add up to at most `capacity`."""
    groups: list[range] = []
    first, used = 0, 0
    for index, length in enumerate(seq_lens):
        assert length <= capacity, f"a sequence of {length} tokens does not fit a workspace of {capacity}"
        if used + length > capacity:
            groups.append(range(first, index))
            first, used = index, 0
        used += length
    if first < len(seq_lens):
        groups.append(range(first, len(seq_lens)))
    return groups


def plan_extend(
    *,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    req_pool_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    req_to_token: torch.Tensor,
    capacity: int,
    seed_queries: int,
) -> list[ExtendGroup]:
    """Lay a prefill batch out in the workspace.

    Args:
        prefix_lens, extend_lens: host integers a request; tokens that have rows already, and new ones.
        req_pool_indices: int [requests]. out_cache_loc: int [>= new tokens], slots of the new tokens, batch order;
            entries behind the last request's are padding.
        req_to_token: int32 [regions, max_context].
        capacity: workspace rows.
        seed_queries: how many of each request's last queries seed its region.
    """
    assert all(new > 0 for new in extend_lens), f"a request with nothing new to prefill: {list(extend_lens)}"
    device = out_cache_loc.device
    seq_lens = [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)]
    token_ends = list(accumulate(extend_lens, initial=0))
    groups = []
    for members in pack_requests(seq_lens, capacity):
        starts = list(accumulate((seq_lens[i] for i in members), initial=0))[:-1]
        prefixes = torch.tensor([prefix_lens[i] for i in members])
        news = torch.tensor([extend_lens[i] for i in members])
        start = torch.tensor(starts)
        owner, position = _ragged(prefixes)
        new_owner, new_offset = _ragged(news)
        tokens = slice(token_ends[members[0]], token_ends[members[-1] + 1])
        regions = req_pool_indices[members[0] : members[-1] + 1].long()
        last = news.cumsum(0).unsqueeze(1) - 1 - torch.arange(seed_queries)
        groups.append(
            ExtendGroup(
                tokens=tokens,
                regions=regions,
                starts=start.to(device),
                prefix_slots=req_to_token[regions[owner.to(device)], position.to(device)].long(),
                prefix_rows=(start[owner] + position).to(device),
                new_slots=out_cache_loc[tokens].long(),
                new_rows=((start + prefixes)[new_owner] + new_offset).to(device),
                token_starts=start[new_owner].int().unsqueeze(1).to(device),
                last_tokens=torch.maximum(last, (news.cumsum(0) - news).unsqueeze(1)).to(device),
            )
        )
    return groups


def _ragged(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For concatenated runs of the given lengths: the run each element belongs to, and its index in that run."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return owner, torch.arange(len(owner)) - (lengths.cumsum(0) - lengths)[owner]
