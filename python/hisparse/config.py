"""`--hisparse-config`: what a user may say, checked once, in one sentence each."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

MAX_DEVICE_BUFFER_SIZE = 32_767
"""LRU rows are numbered in int16."""

DEFAULT_TRACE_MIB = 1024
"""Compressed size of a trace when `trace_mib` is not given."""

MAX_VALUE = 10**9
"""Larger than any tokens, GiB or ratio that could be meant, and small enough for arithmetic in bytes."""


class HiSparseError(ValueError):
    """The user asked for something that cannot work; the message is one sentence that says what would."""


@dataclass(frozen=True)
class HiSparseConfig:
    """The keys of `--hisparse-config` as given; None = not given.

    The first four keep the names of SGLang's own HiSparse, so that its configurations still start.
    """

    top_k: int | None = None
    device_buffer_size: int | None = None
    host_to_device_ratio: float | None = None
    swap_in_block_size: int | None = None
    host_memory_gib: float | None = None
    workspace_tokens: int | None = None
    trace: str | None = None
    trace_requests: float | None = None
    trace_layers: list[int] | None = None
    trace_mib: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in ("trace", "trace_layers"):
                continue
            whole = field.type == "int | None"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise HiSparseError(f"{_key(field.name, value)} must be {'an integer' if whole else 'a number'}.")
            if not 0 < value <= MAX_VALUE:
                raise HiSparseError(f"{_key(field.name, value)} must be positive and at most {MAX_VALUE:,}.")
        self._check_trace()

    def _check_trace(self) -> None:
        if self.trace is not None and (not isinstance(self.trace, str) or not self.trace.strip()):
            raise HiSparseError(f"{_key('trace', self.trace)} must be a folder's name.")
        layers = self.trace_layers
        if layers is not None and (
            not isinstance(layers, list)
            or not layers
            or any(isinstance(layer, bool) or not isinstance(layer, int) or layer < 0 for layer in layers)
            or len(set(layers)) != len(layers)
        ):
            raise HiSparseError(f"{_key('trace_layers', layers)} must be a list of distinct layer numbers from 0.")
        if self.trace_requests is not None and self.trace_requests > 1:
            raise HiSparseError(f"{_key('trace_requests', self.trace_requests)} must be a share, at most 1.")
        for name in ("trace_requests", "trace_layers", "trace_mib"):
            if self.trace is None and getattr(self, name) is not None:
                raise HiSparseError(f"{_key(name, getattr(self, name))} has no meaning without trace, a folder's name.")

    @classmethod
    def from_json(cls, text: str | None) -> HiSparseConfig:
        """Parse the option's value. Raises `HiSparseError` for anything but a JSON object of known keys."""
        if text is None or not text.strip():
            return cls()
        try:
            given = json.loads(text, object_pairs_hook=_no_duplicates)
        except HiSparseError:
            raise
        except (ValueError, RecursionError) as error:  # bad syntax, an integer of thousands of digits, deep nesting
            raise HiSparseError(f"--hisparse-config {text!r} is not valid JSON: {error}.") from None
        if not isinstance(given, dict):
            raise HiSparseError(f"--hisparse-config must be a JSON object, got {text!r}.")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                raise HiSparseError(f"--hisparse-config has the unknown key {key!r}; known are {', '.join(known)}.")
        return cls(**given)

    def resolve(self, *, index_topk: int, page_size: int, context_len: int, workspaces: int = 2) -> ResolvedConfig:
        """Fill in defaults and check the values against a model.

        Args:
            index_topk: positions the model's indexer selects a step.
            page_size: tokens a page of the KV space; also the length of the tail ring.
            context_len: the longest request, in tokens.
            workspaces: 2 where a copy can run beside compute, that is on a GPU; else 1.
        """
        notes = []
        if self.top_k not in (None, index_topk):
            notes.append(f"top_k={self.top_k} is ignored: the model selects index_topk={index_topk} positions.")
        if self.swap_in_block_size is not None:
            notes.append("swap_in_block_size is accepted but has no meaning here: the kernels choose their own grid.")
        if self.host_memory_gib is not None and self.host_to_device_ratio is not None:
            notes.append("host_to_device_ratio is ignored because host_memory_gib is given.")
        largest = MAX_DEVICE_BUFFER_SIZE // page_size * page_size
        if index_topk > largest:
            raise HiSparseError(
                f"the model's index_topk={index_topk} is larger than the largest device_buffer_size, {largest}."
            )
        default = min(_round_up(2 * index_topk, page_size), largest)
        buffer = default if self.device_buffer_size is None else self.device_buffer_size
        if not index_topk <= buffer <= largest or buffer % page_size:
            raise HiSparseError(
                f"{_key('device_buffer_size', buffer)} must be a multiple of the page size {page_size}, at least the "
                f"model's index_topk={index_topk} and at most {largest}; the default is {default}."
            )
        smallest = _round_up(context_len + 1, page_size)
        workspace = smallest if self.workspace_tokens is None else self.workspace_tokens
        if workspace < smallest or workspace % page_size:
            raise HiSparseError(
                f"{_key('workspace_tokens', workspace)} must be a multiple of {page_size} that holds the longest "
                f"request: at least {smallest} for --context-length {context_len}."
            )
        return ResolvedConfig(
            top_k=index_topk,
            device_buffer_size=buffer,
            page_size=page_size,
            workspace_tokens=workspace,
            host_memory_bytes=None if self.host_memory_gib is None else int(self.host_memory_gib * 2**30),
            host_to_device_ratio=None if self.host_memory_gib is not None else self.host_to_device_ratio,
            notes=tuple(notes),
            workspaces=workspaces,
            trace=None if self.trace is None else self._trace(self.trace),
        )

    def _trace(self, folder: str) -> TraceConfig:
        return TraceConfig(
            folder=folder,
            requests=1.0 if self.trace_requests is None else self.trace_requests,
            layers=None if self.trace_layers is None else tuple(sorted(self.trace_layers)),
            max_bytes=int((self.trace_mib or DEFAULT_TRACE_MIB) * 2**20),
        )


@dataclass(frozen=True)
class TraceConfig:
    """What to record: the share of requests in (0, 1], global layer ids (None = all), and how much at most."""

    folder: str
    requests: float
    layers: tuple[int, ...] | None
    max_bytes: int

    def layers_of(self, start_layer: int, layers: int) -> list[int]:
        """Global ids of the recorded layers among `layers` of this process from `start_layer` on.

        Raises `HiSparseError` if none of them is.
        """
        here = range(start_layer, start_layer + layers)
        chosen = [layer for layer in here if self.layers is None or layer in self.layers]
        if not chosen:
            raise HiSparseError(
                f"{_key('trace_layers', list(self.layers or ()))} names none of the layers {here.start} to "
                f"{here.stop - 1}."
            )
        return chosen


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration checked against a model; what the rest of the package works with.

    `host_memory_bytes` and `host_to_device_ratio` may both be None: then the host pool takes its default share of
    the free memory. `notes` are sentences for the log. `workspaces` are the buffers of the prefill workspace: with two,
    one layer's prefix is gathered while another is attended to.
    """

    top_k: int
    device_buffer_size: int
    page_size: int
    workspace_tokens: int
    host_memory_bytes: int | None
    host_to_device_ratio: float | None
    notes: tuple[str, ...] = ()
    workspaces: int = 1
    trace: TraceConfig | None = None

    @property
    def region_rows(self) -> int:
        """Hot rows of one request: its LRU rows, then one page of tail rows."""
        return self.device_buffer_size + self.page_size


def _key(name: str, value: Any) -> str:
    shown = repr(value)
    return f"--hisparse-config {name}={shown if len(shown) <= 40 else shown[:40] + '…'}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise HiSparseError(f"--hisparse-config has the key {key!r} twice.")
    return dict(pairs)
