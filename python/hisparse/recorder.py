"""Records what decode selects, for sampled requests and layers, while the server runs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hisparse.trace_writer import TraceWriter


class Record(NamedTuple):
    """What one forward pass adds, on its way to the host: the tensors are valid once `ready` has happened.

    Attributes:
        rids: the sampled requests, one a column of `positions`.
        seq_lens: int64 [requests] of a decode step; None for a prefill.
        positions: int32 [layers, requests, n], selections of a decode step or candidates of a prefill; -1 = none.
        ready: CUDA event, None on the CPU.
    """

    rids: list[str]
    seq_lens: torch.Tensor | None
    positions: torch.Tensor
    ready: Any


class SelectionRecorder:
    """Takes selections from inside the forward pass and hands them to a writer outside of it.

    The coordinator calls `on_select` and `on_seed` where the device works: `on_select` is one device copy into a static
    tensor, so a CUDA graph can hold it. After the pass, graph or not, `after_decode` copies the rows of the sampled
    requests to the host, asynchronously, on the same stream. Nothing waits for the device but the writer's thread.

    A request is sampled by a hash of its id, so that all ranks, and all its turns under one id, agree.

    Args:
        layers: global ids of the layers to record.
        max_batch, top_k: the largest decode batch, and its selections' width.
        share: of the requests, in (0, 1].
    """

    def __init__(
        self, *, layers: Sequence[int], max_batch: int, top_k: int, share: float, device: Any, writer: TraceWriter
    ) -> None:
        self.writer = writer
        self._share = share
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._selected = torch.full((len(layers), max_batch, top_k), -1, dtype=torch.int32, device=device)
        self._candidates: list[list[torch.Tensor]] = [[] for _ in layers]

    # ---- inside the forward pass

    def begin_extend(self) -> None:
        """A prefill batch begins; candidates of one that SGLang ran to warm up are nobody's."""
        self._candidates = [[] for _ in self._place]

    def on_select(self, layer_id: int, selected: torch.Tensor) -> None:
        """Args: selected: int32 [batch, top_k]."""
        place = self._place.get(layer_id)
        if place is not None:
            self._selected[place, : selected.shape[0]].copy_(selected)

    def on_seed(self, layer_id: int, candidates: torch.Tensor) -> None:
        """Args: candidates: int32 [requests of a group, n]; kept until the pass is over."""
        place = self._place.get(layer_id)
        if place is not None and self.writer.open:
            self._candidates[place].append(candidates)

    # ---- after it

    def after_decode(self, rids: Sequence[str], seq_lens: torch.Tensor) -> None:
        """Args: rids: of the real batch rows. seq_lens: int [>= requests] on the device, the newest token included."""
        rows = self._sampled_rows(rids)
        if rows:
            which = self._to_device(rows)
            self._hand_over([rids[row] for row in rows], seq_lens[which].long(), self._selected[:, which])

    def after_extend(self, rids: Sequence[str]) -> None:
        """Args: rids: of the batch's requests, in its order."""
        candidates, self._candidates = self._candidates, [[] for _ in self._place]
        rows = self._sampled_rows(rids)
        if rows and all(candidates):
            every = torch.stack([torch.cat(groups) for groups in candidates])
            assert every.shape[1] == len(rids), f"seeds of {every.shape[1]} requests in a batch of {len(rids)}"
            self._hand_over([rids[row] for row in rows], None, every[:, self._to_device(rows)])

    def _sampled_rows(self, rids: Sequence[str]) -> list[int]:
        if not self.writer.open:
            return []
        limit = self._share * 2**32
        return [row for row, rid in enumerate(rids) if zlib.crc32(rid.encode()) < limit]

    def _to_device(self, rows: list[int]) -> torch.Tensor:
        on_cuda = self._selected.is_cuda
        return torch.tensor(rows, pin_memory=on_cuda).to(self._selected.device, non_blocking=True)

    def _hand_over(self, rids: list[str], seq_lens: torch.Tensor | None, positions: torch.Tensor) -> None:
        ready = None
        if positions.is_cuda:
            positions = _to_pinned(positions)
            seq_lens = None if seq_lens is None else _to_pinned(seq_lens)
            ready = torch.cuda.Event()
            ready.record()
        self.writer.put(Record(rids, seq_lens, positions, ready))


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
