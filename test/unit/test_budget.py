"""The budget: its bytes are those of the tensors that are allocated, its limits hold, and its table adds up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.budget import (
    DEFAULT_HOST_SHARE,
    DEFAULT_MAX_REQUESTS,
    DEFAULT_REGIONS_SHARE,
    GIB,
    MemoryBudget,
    plan_budget,
    region_bytes,
)
from hisparse.config import HiSparseError, ResolvedConfig, TraceConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.memory import HostPool, HotBuffer
from hisparse.recorder import SelectionRecorder
from hisparse.row_format import Bf16Row, Fp8DsMlaRow, RowFormat

CONFIG = ResolvedConfig(
    top_k=16,
    device_buffer_size=32,
    page_size=8,
    workspace_tokens=264,
    host_memory_bytes=None,
    host_to_device_ratio=None,
)
LAYERS, ROW_BYTES, KEY_BYTES = 3, 64, 20
HUGE = 2**50


def planned(config: ResolvedConfig = CONFIG, **changes: int | None) -> MemoryBudget:
    arguments: dict[str, int | None] = {
        "layers": LAYERS,
        "row_bytes": ROW_BYTES,
        "index_key_bytes": KEY_BYTES,
        "device_bytes": 2**22,
        "free_host_bytes": 2**22,
        "max_requests": 4,
    }
    return plan_budget(config, **(arguments | changes))  # type: ignore[arg-type]


def refused(config: ResolvedConfig = CONFIG, **changes: int | None) -> str:
    with pytest.raises(HiSparseError) as error:
        planned(config, **changes)
    message = str(error.value)
    assert message.endswith(".") and ". " not in message and "\n" not in message, message
    return message


def total(tensors: dict[int, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def tensors_of(*owners: object) -> dict[int, torch.Tensor]:
    """Every tensor that the objects hold, once each."""
    found = [value for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    return {tensor.data_ptr(): tensor for tensor in found}


@pytest.mark.parametrize("chosen", (None, (0, 2), tuple(range(50))), ids=("all", "two", "more than there are"))
def test_a_trace_is_charged_to_the_device(chosen: tuple[int, ...] | None) -> None:
    without = planned(device_bytes=HUGE)
    with_trace = replace(without, config=replace(CONFIG, trace=TraceConfig("folder", 1.0, chosen, 1)))
    recorder = SelectionRecorder(
        layers=with_trace.config.trace.layers_of(0, LAYERS),  # type: ignore[union-attr]
        max_batch=without.max_batch,
        top_k=CONFIG.top_k,
        share=1.0,
        device="cpu",
        writer=None,  # type: ignore[arg-type]
    )
    assert with_trace.device_bytes - without.device_bytes == total(tensors_of(recorder)) > 0
    assert without.trace_bytes == 0
    assert [line for line in with_trace.table().splitlines() if " trace " in line]
    assert " trace " not in without.table()


@pytest.mark.parametrize("row_format", (Bf16Row(24, 8), Bf16Row(), Fp8DsMlaRow()), ids=repr)
@pytest.mark.parametrize(
    ("layers", "regions", "buffer", "page_size", "top_k", "slots"),
    ((1, 2, 8, 8, 8, 16), (3, 5, 48, 16, 20, 64), (4, 2, 64, 64, 32, 256)),
)
def test_every_byte_of_the_budget_is_allocated_and_no_other(
    row_format: RowFormat, layers: int, regions: int, buffer: int, page_size: int, top_k: int, slots: int
) -> None:
    config = replace(
        CONFIG,
        top_k=top_k,
        device_buffer_size=buffer,
        page_size=page_size,
        workspace_tokens=2 * page_size,
        workspaces=2,
    )
    budget = MemoryBudget(config, layers, row_format.row_bytes, KEY_BYTES, regions, slots)
    hot_buffer = HotBuffer.allocate(
        layers=layers,
        regions=regions,
        device_buffer_size=buffer,
        page_size=page_size,
        row_bytes=row_format.row_bytes,
        device="cpu",
    )
    host_pool = HostPool(layers=layers, slots=slots + page_size, row_bytes=row_format.row_bytes, pin=False)
    coordinator = HiSparseCoordinator(
        config=config,
        row_format=row_format,
        host_pool=host_pool,
        hot_buffer=hot_buffer,
        workspace=torch.zeros((config.workspaces, config.workspace_tokens, row_format.row_bytes), dtype=torch.uint8),
        req_to_token=torch.zeros((regions, 100), dtype=torch.int32),
        start_layer=0,
        max_batch=budget.max_batch,
    )
    assert budget.hot_rows_bytes == hot_buffer.rows.nbytes
    assert budget.residency_bytes == total(tensors_of(hot_buffer)) - hot_buffer.rows.nbytes
    assert budget.region_bytes * regions == total(tensors_of(hot_buffer))
    assert budget.workspace_bytes == coordinator.workspace.rows.nbytes
    static = tensors_of(coordinator)
    del static[coordinator.req_to_token.data_ptr()]
    assert budget.step_bytes == total(static)
    assert budget.host_pool_bytes == host_pool.nbytes
    keys = layers * (slots + page_size) * KEY_BYTES
    assert budget.index_keys_bytes == keys
    in_all = total(tensors_of(hot_buffer, coordinator, coordinator.workspace)) - coordinator.req_to_token.nbytes + keys
    assert budget.device_bytes == in_all


# ---- limits


def test_requests_are_those_asked_for_plus_padding() -> None:
    assert planned(max_requests=7).regions == 8


@given(
    device_bytes=st.integers(60_000, 2**23),
    free_host_bytes=st.integers(10_000, 2**23),
    max_requests=st.none() | st.integers(1, 40),
    host_memory=st.none() | st.integers(1, 2**23),
    ratio=st.none() | st.floats(0.01, 100),
)
def test_a_plan_fits_and_no_page_more_would(
    device_bytes: int, free_host_bytes: int, max_requests: int | None, host_memory: int | None, ratio: float | None
) -> None:
    config = replace(CONFIG, host_memory_bytes=host_memory, host_to_device_ratio=None if host_memory else ratio)
    try:
        budget = planned(config, device_bytes=device_bytes, free_host_bytes=free_host_bytes, max_requests=max_requests)
    except HiSparseError:
        return  # which plans are refused: below
    page = config.page_size
    assert budget.slots % page == 0 and budget.slots >= page
    assert budget.device_bytes <= device_bytes
    one_more = replace(budget, slots=budget.slots + page)
    too_much = one_more.device_bytes > device_bytes
    if host_memory is not None:
        assert budget.host_pool_bytes <= host_memory
        too_much |= one_more.host_pool_bytes > host_memory
    elif ratio is not None:
        limit = ratio * (device_bytes // (LAYERS * (ROW_BYTES + KEY_BYTES)))
        assert budget.slots <= limit
        too_much |= one_more.slots > int(limit)
    else:
        assert budget.host_pool_bytes <= free_host_bytes * DEFAULT_HOST_SHARE
        too_much |= one_more.host_pool_bytes > int(free_host_bytes * DEFAULT_HOST_SHARE)
    assert too_much, "a page more would have fitted"


def test_host_memory_is_the_limit_when_the_device_has_plenty() -> None:
    per_token = LAYERS * ROW_BYTES
    assert (
        planned(device_bytes=HUGE, free_host_bytes=2 * 108 * per_token).slots == 96
    )  # 108 - the padding page, floored
    with_size = replace(CONFIG, host_memory_bytes=808 * per_token)
    assert planned(with_size, device_bytes=HUGE, free_host_bytes=0).slots == 800


def test_indexer_keys_are_the_limit_when_the_host_has_plenty() -> None:
    empty = planned(device_bytes=HUGE)
    fixed = replace(empty, slots=0).device_bytes
    for tokens, slots in ((8, 8), (15, 8), (16, 16)):
        budget = planned(device_bytes=fixed + tokens * LAYERS * KEY_BYTES, free_host_bytes=HUGE)
        assert budget.slots == slots


def test_the_ratio_is_over_what_would_fit_without_hisparse() -> None:
    device_bytes = LAYERS * (ROW_BYTES + KEY_BYTES) * 8000
    budget = planned(replace(CONFIG, host_to_device_ratio=1.5), device_bytes=device_bytes, free_host_bytes=0)
    assert budget.slots == 12_000


def test_default_number_of_requests() -> None:
    one = region_bytes(CONFIG, LAYERS, ROW_BYTES)
    assert planned(device_bytes=HUGE, max_requests=None).regions == DEFAULT_MAX_REQUESTS + 1
    budget = planned(device_bytes=int(21 * one / DEFAULT_REGIONS_SHARE), max_requests=None)
    assert budget.regions == 21
    assert budget.regions * one <= DEFAULT_REGIONS_SHARE * int(21 * one / DEFAULT_REGIONS_SHARE)


# ---- refusals


def test_regions_that_do_not_fit_the_device() -> None:
    message = refused(max_requests=5000)
    assert message.startswith("5000 requests need ")
    for option in ("--max-running-requests", "device_buffer_size", "--mem-fraction-static"):
        assert option in message
    needed = MemoryBudget(CONFIG, LAYERS, ROW_BYTES, KEY_BYTES, regions=5001, slots=0).device_bytes
    assert f"{needed / GIB:.3f} GiB of device memory" in message and f"{2**22 / GIB:.3f} GiB are available" in message


@pytest.mark.parametrize("max_requests", (None, 1))
def test_a_device_without_room_for_anything(max_requests: int | None) -> None:
    assert refused(device_bytes=100, max_requests=max_requests).startswith("1 requests need ")


@pytest.mark.parametrize("config", (CONFIG, replace(CONFIG, host_memory_bytes=1)), ids=("free memory", "given size"))
def test_a_host_without_room_for_a_page(config: ResolvedConfig) -> None:
    message = refused(config, free_host_bytes=1)
    assert "no room for a single page of 8 tokens" in message
    assert "the host pool may hold 0 tokens" in message
    assert "host_memory_gib" in message and "--mem-fraction-static" in message


def test_a_device_with_room_for_the_regions_only() -> None:
    fixed = replace(planned(), slots=0).device_bytes
    message = refused(device_bytes=fixed + LAYERS * KEY_BYTES * 7)
    assert "the device memory 7 indexer keys" in message


# ---- the table


def test_the_table_names_every_part_and_its_total_is_right() -> None:
    budget = MemoryBudget(
        replace(CONFIG, device_buffer_size=4096, page_size=64, workspace_tokens=131_136, top_k=2048),
        layers=61,
        row_bytes=656,
        index_key_bytes=132,
        regions=33,
        slots=2**20,
    )
    head, *lines = budget.table().splitlines()
    assert head == "HiSparse: 32 requests at once, 1048576 tokens"
    gib = {}
    for line in lines:
        where, what, size = re.fullmatch(r"  (device|host) +(.+?) +([\d.]+) GiB.*", line).groups()  # type: ignore[union-attr]
        assert (where, what) not in gib
        gib[where, what] = float(size)
    expected = {
        ("device", "hot rows"): budget.hot_rows_bytes,
        ("device", "residency state"): budget.residency_bytes,
        ("device", "prefill workspace"): budget.workspace_bytes,
        ("device", "step buffers"): budget.step_bytes,
        ("device", "indexer keys"): budget.index_keys_bytes,
        ("device", "total"): budget.device_bytes,
        ("host", "host pool"): budget.host_pool_bytes,
    }
    assert gib == {part: round(nbytes / GIB, 3) for part, nbytes in expected.items()}
    parts = sum(size for (where, what), size in gib.items() if where == "device" and what != "total")
    assert gib["device", "total"] == pytest.approx(parts, abs=0.0005 * 6)
    assert "33 regions x (4096 + 64) rows x 61 layers x 656 B" in budget.table()


@pytest.mark.parametrize(("regions", "rows"), [(1, 64), (14, 64), (64, 64), (65, 128)])
def test_the_step_has_room_for_a_padded_batch(regions: int, rows: int) -> None:
    """SGLang pads to multiples of its attention-parallel sizes: 13 requests a rank run as 16 with four ranks."""
    assert MemoryBudget(CONFIG, 1, 1152, KEY_BYTES, regions, 64).max_batch == rows


def test_several_processes_of_a_host_are_added_up_in_the_table() -> None:
    budget = planned()
    assert "host total" not in budget.table()
    *_, last = budget.table(4).splitlines()
    assert last.split()[:4] == ["host", "host", "total", f"{4 * budget.host_pool_bytes / GIB:.3f}"]
    assert last.endswith("4 processes on this host, each with a host pool of its own")
