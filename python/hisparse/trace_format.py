"""Recorded selections: what the indexer chose, decode step by decode step. Reader and writer; numpy only.

A trace is one `.npz` file, or a folder of them (the parts that a server wrote, one after the other, in the order of
their names). Every file is complete in itself:

==============  ====================  =================================================================================
array           type                  meaning
==============  ====================  =================================================================================
`about`         text                  a JSON object, see below
`step`          unsigned [n]          decode step of the server, counted through all parts
`layer`         unsigned [n]          global layer id
`request`       unsigned [n]          from 0; a request that prefills again (retraction, next turn) gets a new number
`seq_len`       unsigned [n]          tokens of the request, the newest included
`selected`      unsigned [n, top_k]   positions, ascending if `order` says so, else as swap-in got them; `none` = none
`seed_layer`    unsigned [m]          optional, as the next two: layer and request of a seeded region
`seed_request`  unsigned [m]
`seeded`        unsigned [m, k]       distinct positions that the prefill offered, most wanted first; `none` = no more
==============  ====================  =================================================================================

Row i of the first five is what one request selected in one layer at one step, in the order of the calls. Within a
request `seq_len` rises by one a step. The position of a request's first generated token, where its tail ring begins,
is its first `seq_len` - 1. A region takes the first `device_buffer_size` positions of `seeded` and makes the most
wanted one its most recently used; a request without a row there starts with an empty region, as far as the trace
knows.

`about` has `top_k`, `page_size` and `none` (the largest value of `selected`'s type) always; a server's parts also have
`format` (1), `model`, `row_bytes`, `device_buffer_size` (of the recording server), `layers` (recorded), `num_layers`
(of the model on this process), `rank`, `sampled_requests` (0..1), `order` ("ascending") and `part`.

Why ascending: it takes a third of the space and a tenth of the time of any other order. The order decides which of
the rows loaded in one step is evicted first, later on. On the CPU SGLang's selections are ascending anyway, so that a
replay has the server's hits exactly; on a GPU they come in no particular order, which also changes from run to run.

Types are the smallest that hold the values; `Trace` always has int64 and int32 with -1 for none.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
"""Version of the layout above. A reader refuses a higher one."""

SUFFIX = ".npz"
COLUMNS = ("step", "layer", "request", "seq_len")
SEED_COLUMNS = ("seed_layer", "seed_request")


class TraceError(ValueError):
    """The file is no trace that this version can read; the message is one sentence."""


def _empty(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int64 if len(shape) == 1 else np.int32)


@dataclass(frozen=True)
class Trace:
    """A trace in memory.

    Attributes:
        about: what `about` holds.
        step, layer, request, seq_len: int64 [n].
        selected: int32 [n, top_k], -1 = none.
        seed_layer, seed_request: int64 [m].
        seeded: int32 [m, k], -1 = no more.
    """

    about: dict[str, Any]
    step: np.ndarray
    layer: np.ndarray
    request: np.ndarray
    seq_len: np.ndarray
    selected: np.ndarray
    seed_layer: np.ndarray = field(default_factory=lambda: _empty(0))
    seed_request: np.ndarray = field(default_factory=lambda: _empty(0))
    seeded: np.ndarray = field(default_factory=lambda: _empty(0, 0))

    @property
    def top_k(self) -> int:
        return self.selected.shape[1]

    @property
    def page_size(self) -> int:
        return int(self.about["page_size"])

    def sequences(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """`(request, layer, rows)` of each pair, in ascending order; rows index the arrays, in order of steps."""
        order = np.lexsort((np.arange(len(self.step)), self.layer, self.request))
        keys = np.stack((self.request[order], self.layer[order]))
        starts = np.flatnonzero((np.diff(keys, prepend=-1) != 0).any(0)) if len(order) else order
        for rows in np.split(order, starts[1:]) if len(order) else []:
            yield int(self.request[rows[0]]), int(self.layer[rows[0]]), rows

    def seed_of(self, request: int, layer: int) -> np.ndarray:
        """int32 [<= k], what a region was offered before its first step, most wanted first; empty if not recorded."""
        rows = np.flatnonzero((self.seed_request == request) & (self.seed_layer == layer))
        if not len(rows):
            return _empty(1, 0)[0]
        seeded = self.seeded[rows[-1]]
        return seeded[seeded >= 0]


def trace_files(path: Path) -> list[Path]:
    """The files of a trace, in order. A folder without any, but with one folder that has some, stands for that one;
    with several it is refused, as they are the traces of several starts or ranks. Raises `TraceError`."""
    files = sorted(path.glob("*" + SUFFIX)) if path.is_dir() else [path]
    if not files:
        inner = sorted({file.parent for file in path.glob("*/*" + SUFFIX)})
        if len(inner) > 1:
            raise TraceError(f"{path} holds several traces, name one of {', '.join(folder.name for folder in inner)}.")
        files = sorted(inner[0].glob("*" + SUFFIX)) if inner else []
    if not files or not files[0].is_file():
        raise TraceError(f"{path} is neither a trace ({SUFFIX}) nor a folder that holds one.")
    return files


def read_parts(path: Path) -> Iterator[Trace]:
    """The trace part by part, for one that does not fit the memory. Raises `TraceError`."""
    for file in trace_files(path):
        yield _read_file(file)


def read_trace(path: Path) -> Trace:
    """The whole trace; a folder's parts joined, `about` of the first. Raises `TraceError`.

    A folder with the parts of several ranks is refused: their requests have the same numbers.
    """
    parts = list(read_parts(path))
    first = parts[0]
    for part in parts[1:]:
        for key in ("top_k", "page_size", "rank"):
            if part.about.get(key) != first.about.get(key):
                raise TraceError(
                    f"{path} holds parts of different traces: {key} is {first.about.get(key)} and "
                    f"{part.about.get(key)}."
                )
    if len(parts) == 1:
        return first
    width = max(part.seeded.shape[1] for part in parts)
    wide = [np.pad(part.seeded, ((0, 0), (0, width - part.seeded.shape[1])), constant_values=-1) for part in parts]
    columns = (*COLUMNS, *SEED_COLUMNS, "selected")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    return Trace(about=first.about, seeded=np.concatenate(wide), **joined)


def write_trace(path: Path, trace: Trace, level: int = 6) -> None:
    """Write one file, compressed by zlib's `level`; it appears under its name when it is whole."""
    if "page_size" not in trace.about:
        raise TraceError(f"a trace needs page_size in about, got {sorted(trace.about)}.")
    largest = max(int(trace.selected.max(initial=0)), int(trace.seeded.max(initial=0)))
    kind = _unsigned(max(largest + 1, 256))  # one value more, for none; never uint8
    none = int(np.iinfo(kind).max)
    about = {"format": FORMAT, **trace.about, "top_k": trace.top_k, "none": none}
    arrays: dict[str, Any] = {name: _narrow(getattr(trace, name)) for name in COLUMNS}
    arrays["selected"] = np.where(trace.selected < 0, none, trace.selected).astype(kind)
    if len(trace.seeded):
        arrays |= {name: _narrow(getattr(trace, name)) for name in SEED_COLUMNS}
        arrays["seeded"] = np.where(trace.seeded < 0, none, trace.seeded).astype(kind)
    arrays["about"] = np.array(json.dumps(about))
    partial = path.with_name(path.name + ".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as file:
        for name, array in arrays.items():
            with file.open(name + ".npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    os.replace(partial, path)


def _read_file(path: Path) -> Trace:
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays["about"]))
        none = about["none"]
        version = about.get("format", FORMAT)
        if version > FORMAT:
            raise TraceError(f"{path} has the trace format {version}; this version of HiSparse reads up to {FORMAT}.")
        rows = len(arrays["step"])
        for name in (*COLUMNS, "selected"):
            if len(arrays[name]) != rows:
                raise TraceError(f"{path} is damaged: {name} has {len(arrays[name])} rows, step has {rows}.")
        seeds = {name: arrays[name].astype(np.int64) for name in SEED_COLUMNS if name in arrays}
        if "seeded" in arrays:
            seeds["seeded"] = _positions(arrays["seeded"], none)
        return Trace(
            about=about,
            selected=_positions(arrays["selected"], none),
            **{name: arrays[name].astype(np.int64) for name in COLUMNS},
            **seeds,
        )
    except TraceError:
        raise
    except Exception as error:  # zipfile, zlib, numpy and json each have their own
        raise TraceError(f"{path} is no trace that can be read ({type(error).__name__}: {error}).") from None


def _positions(stored: np.ndarray, none: int) -> np.ndarray:
    return np.where(stored == none, -1, stored.astype(np.int32))


def _narrow(values: np.ndarray) -> np.ndarray:
    return values.astype(_unsigned(int(values.max(initial=0))))


def _unsigned(largest: int) -> Any:
    return next(kind for kind in (np.uint8, np.uint16, np.uint32) if largest <= np.iinfo(kind).max)
