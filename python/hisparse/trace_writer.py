"""Turns recorded steps into the parts of a trace, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.trace_format import SUFFIX, Trace, write_trace

logger = logging.getLogger(__name__)

PART_BYTES = 32 * 2**20
"""Selections in memory before a part is written, uncompressed."""

LEVEL = 1
"""zlib's. At 6 a row of 2,048 positions takes 2.5 times as long, and half the space."""

QUIET_S = 2.0
"""A part is also written when nothing came for this long: the end of a server is sudden."""

MAX_WAITING = 32
"""Steps that may wait for the thread. A server that selects faster than it can compress waits here."""

MAX_REQUESTS = 65_536
"""Requests whose number is remembered; one that is forgotten while it runs gets a new number."""

MAX_SEEDS = 512
"""Prefilled requests whose candidates are kept until their first decode step, which some never have."""


class TraceWriter:
    """Numbers the requests, and writes a part when enough has come or nothing comes.

    Ends by itself when the trace has its size, or cannot be written: `open` is False from then on, and `put` returns at
    once. The server goes on in any case.

    Args:
        folder: made if needed; parts are `part-00000.npz` and so on.
        about: of every part (trace_format); `layers` in it are the layers of the records, in their order.
        max_bytes: of all parts together; the part that exceeds it is the last.
    """

    def __init__(self, folder: Path, about: dict[str, Any], max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.open = True
        self._about = about
        self._layers = np.array(about["layers"], np.int64)
        self._bytes_left = max_bytes
        self._waiting: queue.Queue[Any] = queue.Queue(MAX_WAITING)
        self._part = self._step = self._count = 0
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._seeds: OrderedDict[str, np.ndarray] = OrderedDict()
        self._clear()
        self._thread = threading.Thread(target=self._run, name="hisparse trace", daemon=True)
        self._thread.start()

    def put(self, record: Any) -> None:
        """Hand over a `recorder.Record`. Waits while `MAX_WAITING` of them are not yet taken."""
        while self.open:
            try:
                self._waiting.put(record, timeout=1)
                return
            except queue.Full:
                continue

    def close(self) -> None:
        """Write what is there and end the thread."""
        self.put(None)
        self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        try:
            while self.open:
                try:
                    record = self._waiting.get(timeout=QUIET_S if self._rows else None)
                except queue.Empty:
                    self._write_part()
                    continue
                if record is None:
                    self._write_part()
                    break
                self._take(record)
                if self._bytes >= PART_BYTES:
                    self._write_part()
        except Exception:
            logger.exception("HiSparse: the trace in %s ends here", self.folder)
        finally:
            self.open = False
            while not self._waiting.empty():  # pinned memory that nobody would take any more
                self._waiting.get_nowait()

    def _take(self, record: Any) -> None:
        if record.ready is not None:
            record.ready.synchronize()
        positions = record.positions.numpy()
        if record.seq_lens is None:
            for column, rid in enumerate(record.rids):
                _remember(self._seeds, rid, positions[:, column].copy(), MAX_SEEDS)
                self._numbers.pop(rid, None)
            return
        for rid in record.rids:
            if rid not in self._numbers:
                self._begin(rid)
        numbers = np.array([self._numbers[rid] for rid in record.rids], np.int64)
        layers, requests, _ = positions.shape
        self._rows.append(
            {
                "step": np.full(layers * requests, self._step),
                "layer": np.repeat(self._layers, requests),
                "request": np.tile(numbers, layers),
                "seq_len": np.tile(record.seq_lens.numpy(), layers),
                # As unsigned numbers, so that -1 comes last.
                "selected": np.sort(positions.reshape(layers * requests, -1).view(np.uint32)).view(np.int32),
            }
        )
        self._bytes += positions.nbytes
        self._step += 1

    def _begin(self, rid: str) -> None:
        """The request's first step: its number, and what its last prefill offered."""
        number, self._count = self._count, self._count + 1
        _remember(self._numbers, rid, number, MAX_REQUESTS)
        for layer, candidates in zip(self._layers.tolist(), self._seeds.pop(rid, ()), strict=False):
            wanted = candidates[candidates >= 0]
            first = np.sort(np.unique(wanted, return_index=True)[1])
            self._seeded.append((layer, number, wanted[first]))

    def _write_part(self) -> None:
        if not self._rows:
            return
        columns = {name: np.concatenate([row[name] for row in self._rows]) for name in self._rows[0]}
        width = max((len(seeded) for _, _, seeded in self._seeded), default=0)
        seeded = np.full((len(self._seeded), width), -1, np.int32)
        for place, (_, _, positions) in enumerate(self._seeded):
            seeded[place, : len(positions)] = positions
        path = self.folder / f"part-{self._part:05}{SUFFIX}"
        write_trace(
            path,
            Trace(
                about={**self._about, "order": "ascending", "part": self._part},
                seed_layer=np.array([layer for layer, _, _ in self._seeded], np.int64),
                seed_request=np.array([number for _, number, _ in self._seeded], np.int64),
                seeded=seeded,
                **columns,
            ),
            LEVEL,
        )
        self._part += 1
        self._clear()
        self._bytes_left -= path.stat().st_size
        if self._bytes_left <= 0:
            self.open = False
            logger.info("HiSparse: the trace in %s has reached trace_mib and is complete", self.folder)

    def _clear(self) -> None:
        self._rows: list[dict[str, np.ndarray]] = []
        self._seeded: list[tuple[int, int, np.ndarray]] = []
        self._bytes = 0


def _remember(memory: OrderedDict[str, Any], key: str, value: Any, limit: int) -> None:
    """Set the key, forgetting the one that was set longest ago if there are too many."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > limit:
        memory.popitem(last=False)
