"""What the launchers refuse, by name. Needs no GPU: the tensors are fake, and nothing is launched."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hisparse.row_format import Bf16Row, Fp8DsMlaRow, RowFormat
from hisparse_kernel import cuda_ops, reference
from hisparse_kernel.jit import SOURCE_DIR

REGIONS, BUFFER, PAGE, BATCH, TOP_K = 4, 128, 16, 3, 64


class Recorder:
    """Stands for the compiled module: remembers which kernels were called."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.launched.append(name)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(cuda_ops, "cuda_module", lambda: recorder)
    monkeypatch.setattr(cuda_ops, "_stream", lambda tensor: 0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 4096)
    with FakeTensorMode():
        yield recorder


def cuda(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def rows(count: int, row_bytes: int = 656, device: str = "cuda") -> torch.Tensor:
    return torch.empty(count, row_bytes, dtype=torch.uint8, device=device)


def swap_in_arguments() -> dict[str, Any]:
    return {
        "selected": cuda(BATCH, TOP_K),
        "seq_lens": cuda(BATCH, dtype=torch.int64),
        "req_pool_indices": cuda(BATCH, dtype=torch.int64),
        "num_real_reqs": cuda(1),
        "req_to_token": cuda(REGIONS + 1, 1000),
        "host_rows": rows(500, device="cpu"),
        "hot_rows": rows(REGIONS * (BUFFER + PAGE)),
        "owners": cuda(REGIONS, BUFFER),
        "lru_order": cuda(REGIONS, BUFFER, dtype=torch.int16),
        "tail_start": cuda(REGIONS),
        "page_size": PAGE,
        "out": cuda(BATCH, TOP_K),
        "counters": cuda(3, dtype=torch.int64),
    }


def store_decode_arguments(row_format: RowFormat | None = None) -> dict[str, Any]:
    row_format = row_format or Fp8DsMlaRow()
    return {
        "k_nope": cuda(BATCH, 1, row_format.nope_dim, dtype=torch.bfloat16),
        "k_rope": cuda(BATCH, row_format.rope_dim, dtype=torch.bfloat16),
        "slots": cuda(BATCH, dtype=torch.int64),
        "seq_lens": cuda(BATCH),
        "req_pool_indices": cuda(BATCH),
        "num_real_reqs": cuda(1),
        "host_rows": rows(500, row_format.row_bytes, "cpu"),
        "hot_rows": rows(REGIONS * (BUFFER + PAGE), row_format.row_bytes),
        "device_buffer_size": BUFFER,
        "page_size": PAGE,
        "row_format": row_format,
    }


def store_extend_arguments() -> dict[str, Any]:
    return {
        "k_nope": cuda(9, 512, dtype=torch.bfloat16),
        "k_rope": cuda(9, 64, dtype=torch.bfloat16),
        "slots": cuda(9),
        "row_ids": cuda(9, dtype=torch.int64),
        "host_rows": rows(500, 1152, "cpu"),
        "workspace": rows(100, 1152),
        "row_format": Bf16Row(),
    }


def gather_arguments() -> dict[str, Any]:
    return {"host_rows": rows(500, device="cpu"), "slots": cuda(9), "workspace": rows(100), "row_ids": cuda(9)}


def seed_arguments() -> dict[str, Any]:
    return {
        "candidates": cuda(2, 77),
        "regions": cuda(2, dtype=torch.int64),
        "workspace_starts": cuda(2),
        "workspace": rows(100),
        "hot_rows": rows(REGIONS * (BUFFER + PAGE)),
        "owners": cuda(REGIONS, BUFFER),
        "lru_order": cuda(REGIONS, BUFFER, dtype=torch.int16),
        "page_size": PAGE,
    }


def reset_arguments() -> dict[str, Any]:
    return {
        "owners": cuda(2, REGIONS, BUFFER),
        "lru_order": cuda(2, REGIONS, BUFFER, dtype=torch.int16),
        "tail_start": cuda(REGIONS),
        "regions": cuda(3),
        "seq_lens": cuda(3, dtype=torch.int64),
    }


GOOD = {
    "swap_in": swap_in_arguments,
    "store_decode": store_decode_arguments,
    "store_extend": store_extend_arguments,
    "gather": gather_arguments,
    "seed": seed_arguments,
    "reset": reset_arguments,
}


@pytest.mark.parametrize("op", GOOD)
def test_good_arguments_are_launched(op: str, module: Recorder) -> None:
    getattr(cuda_ops, op)(**GOOD[op]())
    assert module.launched == [op]


@pytest.mark.parametrize("op", GOOD)
def test_signatures_are_the_references(op: str) -> None:
    assert inspect.signature(getattr(cuda_ops, op)) == inspect.signature(getattr(reference, op))


TENSORS = {
    "swap_in": "selected seq_lens req_pool_indices num_real_reqs req_to_token host_rows hot_rows owners lru_order "
    "tail_start out counters",
    "store_decode": "k_nope k_rope slots seq_lens req_pool_indices num_real_reqs host_rows hot_rows",
    "store_extend": "k_nope k_rope slots row_ids host_rows workspace",
    "gather": "host_rows slots workspace row_ids",
    "seed": "candidates regions workspace_starts workspace hot_rows owners lru_order",
    "reset": "owners lru_order tail_start regions seq_lens",
}
EVERY_TENSOR = [(op, name) for op, names in TENSORS.items() for name in names.split()]


@pytest.mark.parametrize(("op", "name"), EVERY_TENSOR)
def test_a_wrong_dtype_is_refused_by_name(op: str, name: str, module: Recorder) -> None:
    arguments = GOOD[op]()
    arguments[name] = arguments[name].to(torch.float64)
    with pytest.raises(TypeError, match=rf"^{op}: {name} must be .*, got float64$"):
        getattr(cuda_ops, op)(**arguments)
    assert module.launched == []


@pytest.mark.parametrize(("op", "name"), EVERY_TENSOR)
def test_a_wrong_rank_is_refused_by_name(op: str, name: str, module: Recorder) -> None:
    arguments = GOOD[op]()
    shape, dtype = arguments[name].shape, arguments[name].dtype
    arguments[name] = torch.empty(1, 1, *shape, dtype=dtype, device=arguments[name].device)
    with pytest.raises(ValueError, match=rf"^{op}: {name} must have shape \["):
        getattr(cuda_ops, op)(**arguments)
    assert module.launched == []


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY_TENSOR if name != "host_rows"])
def test_a_tensor_on_the_host_is_refused_by_name(op: str, name: str, module: Recorder) -> None:
    arguments = GOOD[op]()
    arguments[name] = torch.empty(arguments[name].shape, dtype=arguments[name].dtype)
    with pytest.raises(ValueError, match=rf"^{op}( needs CUDA tensors|: {name} must be on cuda:0)"):
        getattr(cuda_ops, op)(**arguments)
    assert module.launched == []


MISFITS = {
    "batch": ("swap_in", {"seq_lens": lambda: cuda(BATCH + 1)}, "seq_lens has 4 in dimension 0, must be 3"),
    "out": ("swap_in", {"out": lambda: cuda(BATCH, TOP_K - 1)}, "out has 63 in dimension 1, must be 64"),
    "owners and order": ("swap_in", {"lru_order": lambda: cuda(REGIONS, 9, dtype=torch.int16)}, "lru_order has 9"),
    "counters": (
        "swap_in",
        {"counters": lambda: cuda(2, dtype=torch.int64)},
        "counters has 2 in dimension 0, must be 3",
    ),
    "page": ("swap_in", {"page_size": lambda: 0}, "page_size must be positive, got 0"),
    "hot rows": ("swap_in", {"page_size": lambda: PAGE + 1}, r"hot_rows must have regions \* .* = 4 \* \(128 \+ 17\)"),
    "req_to_token": (
        "swap_in",
        {"req_to_token": lambda: cuda(REGIONS - 1, 10)},
        "req_to_token must have a row for each",
    ),
    "row bytes": (
        "swap_in",
        {"host_rows": lambda: rows(9, 1152, "cpu")},
        "host_rows has 1152 in dimension 1, must be 656",
    ),
    "top-k": (
        "swap_in",
        {"selected": lambda: cuda(BATCH, 129), "out": lambda: cuda(BATCH, 129)},
        "top_k must be 1 to device_buffer_size = 128, got 129",
    ),
    "stride": ("swap_in", {"selected": lambda: cuda(TOP_K, BATCH).t()}, "selected must be contiguous in its last"),
    "regions apart": (
        "swap_in",
        {"owners": lambda: cuda(REGIONS, 2 * BUFFER).as_strided((REGIONS, BUFFER), (2 * BUFFER, 1))},
        "owners must be contiguous",
    ),
    "row size": (
        "gather",
        {"host_rows": lambda: rows(9, 650, "cpu"), "workspace": lambda: rows(9, 650)},
        "rows of workspace must be multiples of 16 bytes",
    ),
    "row stride": (
        "gather",
        {"host_rows": lambda: rows(9, 660, "cpu").as_strided((9, 656), (660, 1))},
        "rows of host_rows must be multiples",
    ),
    "overlap": (
        "gather",
        {"host_rows": lambda: rows(9, 656, "cpu").as_strided((9, 656), (640, 1))},
        "rows of host_rows must not overlap",
    ),
    "dims": ("store_decode", {"k_rope": lambda: cuda(BATCH, 60, dtype=torch.bfloat16)}, "k_rope has 60 in dimension 1"),
    "format": ("store_decode", {"row_format": Bf16Row}, "rows of format bf16 have 1152 bytes, the tensors' 656"),
    "buffer": (
        "store_decode",
        {"device_buffer_size": lambda: 100},
        "hot_rows has 576 rows, not a multiple of device_buffer_size",
    ),
    "candidates": ("seed", {"candidates": lambda: cuda(2, 32_768)}, "at most 32767 candidates a request, got 32768"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_named(name: str, module: Recorder) -> None:
    op, changes, message = MISFITS[name]
    arguments = GOOD[op]() | {argument: make() for argument, make in changes.items()}
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        getattr(cuda_ops, op)(**arguments)
    assert module.launched == []


def test_pageable_host_rows_are_refused(module: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    with pytest.raises(ValueError, match=r"^gather: host_rows must be pinned host memory"):
        cuda_ops.gather(**gather_arguments())
    assert module.launched == []


def test_unaligned_rows_are_refused(module: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 4100)
    with pytest.raises(ValueError, match=r"at addresses that are, got .* at 0x1004"):
        cuda_ops.gather(**gather_arguments())
    assert module.launched == []


def test_a_format_without_a_packing_kernel_is_refused(module: Recorder) -> None:
    class Unknown(Bf16Row):
        name = "unknown"

    known = store_extend_arguments()
    assert isinstance(Unknown(), RowFormat)
    known["row_format"] = object.__new__(_OtherFormat)
    with pytest.raises(TypeError, match="no CUDA store packs rows of format other"):
        cuda_ops.store_extend(**known)


class _OtherFormat(RowFormat):
    name, nope_dim, rope_dim, row_bytes = "other", 512, 64, 1152

    def pack(self, k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


def test_an_empty_batch_launches_nothing(module: Recorder) -> None:
    arguments = swap_in_arguments()
    for name in ("selected", "out", "seq_lens", "req_pool_indices"):
        arguments[name] = cuda(0, *arguments[name].shape[1:], dtype=arguments[name].dtype)
    assert cuda_ops.swap_in(**arguments) is arguments["out"]
    assert module.launched == []


def test_counter_columns_are_the_same_in_cuda() -> None:
    enum = f"enum Counter {{ kTail = {reference.TAIL}, kHit = {reference.HIT}, kMiss = {reference.MISS} }};"
    assert enum in (SOURCE_DIR / "hisparse.cuh").read_text()
