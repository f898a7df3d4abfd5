"""Device work beside the current stream, until somebody needs its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream that forks off the current one and is joined later; on the CPU everything happens at once.

    CUDA graphs capture forks and joins as edges, so a replayed graph runs the same things beside each other. What runs
    here must not be freed or overwritten on the current stream before `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._running = False

    @property
    def is_real(self) -> bool:
        """False on the CPU."""
        return self._stream is not None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched in this context waits for what the current stream has been given, and for no more."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._running = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for what was forked since the last join."""
        if self._running:
            assert self._stream is not None
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._running = False
