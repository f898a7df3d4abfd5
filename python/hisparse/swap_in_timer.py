"""How long a swap-in call takes, measured where it runs: also inside a replayed CUDA graph."""

from __future__ import annotations

import logging
import time

import torch

logger = logging.getLogger(__name__)


class SwapInTimer:
    """Times one layer's swap-in call in every step; who wants a sample takes the last one.

    On CUDA two events stand before and behind the kernel. Recorded under capture with `external=True` they become nodes
    of the graph, so every replay sets them anew: two events a step, in one layer, is the whole cost. Reading them
    waits for nothing. On the CPU it is the wall time of the call.

    Attributes:
        layer: index of the timed layer in this process's tensors.
    """

    def __init__(self, layer: int, device: torch.device) -> None:
        self.layer = layer
        self._cuda = device.type == "cuda"
        self._seconds: float | None = None
        self._recorded = False
        if self._cuda:
            self._begin = torch.cuda.Event(enable_timing=True, external=True)
            self._end = torch.cuda.Event(enable_timing=True, external=True)

    def start(self) -> None:
        if self._cuda:
            self._begin.record()
        else:
            self._begun = time.perf_counter()

    def stop(self) -> None:
        if self._cuda:
            self._end.record()
            self._recorded = True
        else:
            self._seconds = time.perf_counter() - self._begun

    def take(self) -> float | None:
        """Seconds of the last finished call; None if there is none, or while the next one runs.

        On CUDA the same call may be taken twice: ask only after another step.
        """
        if not self._cuda:
            seconds, self._seconds = self._seconds, None
            return seconds
        try:
            if not (self._recorded and self._begin.query() and self._end.query()):
                return None
            milliseconds = self._begin.elapsed_time(self._end)
        except (RuntimeError, ValueError):  # captured but never replayed, or set anew between the questions
            return None
        # Between the two events of the next step, the pair is that step's begin and the last one's end.
        return milliseconds / 1e3 if milliseconds > 0 else None


def working_timer(layer: int, device: torch.device) -> SwapInTimer | None:
    """A timer that was tried once on this device, in a small captured graph; None, with a line in the log, if that
    failed. A measurement must not be what keeps a server from starting."""
    if device.type != "cuda":
        return SwapInTimer(layer, device)
    try:
        timer = SwapInTimer(layer, device)
        work, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            timer.start()
            work.add_(1)
            timer.stop()
        graph.replay()
        torch.cuda.synchronize(device)
        if timer.take() is None:
            raise RuntimeError("events recorded in a graph give no time")
    except Exception as error:
        logger.warning("HiSparse: swap-in time is not measured on this machine: %s", error)
        return None
    return SwapInTimer(layer, device)
