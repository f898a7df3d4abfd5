"""The prefill workspace: one layer's rows of a group of requests, and the next one's prefix on its way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hisparse_kernel as kernel
from hisparse.extend_plan import ExtendGroup
from hisparse.memory import HostPool
from hisparse.side_stream import SideStream


class Workspace:
    """Device rows that prefill attends to, reused layer after layer.

    With two buffers on a GPU, the prefix of the next group, or of the next layer's first group, is gathered from the
    host pool on a stream of its own while attention reads the other buffer. All its rows are in the host pool before
    the batch begins (I1), so nothing has to be waited for but the buffer's last reader.

    Args:
        rows: uint8 [buffers, tokens, row_bytes] on the device; one buffer or two.
        poison: fill rows with this byte before anything is gathered into them; None = leave them.
    """

    def __init__(self, rows: torch.Tensor, host_pool: HostPool, poison: int | None = None) -> None:
        self.rows = rows
        self._host_pool = host_pool
        self._poison = poison
        self._groups: Sequence[ExtendGroup] = ()
        self._turn = 0
        self._ahead: tuple[int, int] | None = None
        self._beside = SideStream(rows.device)
        self._gathers_ahead = self._beside.is_real and rows.shape[0] > 1

    @property
    def capacity(self) -> int:
        """Tokens that a group may have."""
        return self.rows.shape[1]

    def begin(self, groups: Sequence[ExtendGroup]) -> None:
        """The groups of a new batch, in the order in which every layer will ask for them."""
        self._join()
        self._groups = groups

    def prefix(self, layer: int, group: ExtendGroup) -> torch.Tensor:
        """The buffer, uint8 [tokens, row_bytes], with the group's prefix rows of a layer in place.

        Args:
            layer: index into the host pool. group: one of those that `begin` got.
        """
        index = next(i for i, other in enumerate(self._groups) if other is group)
        ready = self._ahead == (layer, index)
        self._join()
        if not ready:
            self._gather(layer, group)
        rows = self.rows[self._turn]
        if self._gathers_ahead:
            self._start(*((layer, index + 1) if index + 1 < len(self._groups) else (layer + 1, 0)))
        return rows

    def _start(self, layer: int, index: int) -> None:
        if layer == self._host_pool.rows.shape[0] or not self._groups[index].prefix_slots.numel():
            return
        self._turn = 1 - self._turn
        self._ahead = (layer, index)
        with self._beside.fork():  # what runs by now read the other buffer last
            self._gather(layer, self._groups[index])

    def _join(self) -> None:
        self._beside.join()
        self._ahead = None

    def _gather(self, layer: int, group: ExtendGroup) -> None:
        rows = self.rows[self._turn]
        if self._poison is not None:
            rows.fill_(self._poison)
        kernel.gather(
            host_rows=self._host_pool.rows[layer], slots=group.prefix_slots, workspace=rows, row_ids=group.prefix_rows
        )
