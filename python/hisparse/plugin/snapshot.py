"""Reading device counters without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch


class CounterSnapshot:
    """A copy of a device tensor on the host, made in the order of a stream and read when it has arrived.

    Args:
        source: on the device; only ever written by kernels of `stream`.
        stream: CUDA stream of the forward passes; ignored on the CPU.
    """

    def __init__(self, source: torch.Tensor, stream: Any) -> None:
        self._source = source
        self._stream = stream
        self._arrived = torch.zeros_like(source, device="cpu")
        self._cuda = source.is_cuda
        if self._cuda:
            self._pinned = torch.zeros(source.shape, dtype=source.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()
            self._under_way = False

    def enqueue(self) -> None:
        """Copy what the source will hold when the work launched so far is done."""
        if not self._cuda:
            self._arrived.copy_(self._source)
            return
        if self._under_way and not self._copied.query():
            return  # one copy at a time: the pinned tensor is not read while it is written
        self._keep()
        with torch.cuda.stream(self._stream):
            self._pinned.copy_(self._source, non_blocking=True)
            self._copied.record()
        self._under_way = True

    def read(self, *, wait: bool = False) -> torch.Tensor:
        """The newest copy that has arrived; the same tensor every time. `wait`: for the one under way, if any."""
        if self._cuda and self._under_way:
            if wait:
                self._copied.synchronize()
            if self._copied.query():
                self._keep()
        return self._arrived

    def _keep(self) -> None:
        if self._under_way:
            self._arrived.copy_(self._pinned)
            self._under_way = False
