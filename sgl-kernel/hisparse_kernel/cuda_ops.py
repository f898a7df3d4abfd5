"""The data plane on CUDA: same names, signatures and results as `hisparse_kernel.reference`.

Each function checks its tensors and launches one kernel on torch's current stream. No function allocates or waits
for the device, so all of them can be captured in a CUDA graph once the module is loaded (`warm_up`).

Where the reference would raise on bad device data (a region or slot that does not exist), the kernels leave that
row out: nothing is written for it, and swap-in returns -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hisparse.row_format import Bf16Row, Fp8DsMlaRow, RowFormat
from hisparse_kernel.checks import INT32, INT32_OR_64, MAX_LRU_ROWS, LaunchChecks
from hisparse_kernel.jit import cuda_module

GATHER_CTAS = 32
"""512 threads each: enough to fill a PCIe 5 x16 link, and a quarter of an H200 left busy at most."""

MAX_SEED_CANDIDATES = 32_767
SEED_CTAS = 8


def warm_up() -> None:
    """Compile and load the kernels, which must have happened before a CUDA graph is captured."""
    cuda_module()


class LaunchShape(NamedTuple):
    """How swap_in is launched; docs/kernel-notes.md has the measurements behind `launch_shape`."""

    threads: int
    """Threads of a CTA: 1024 or 512."""

    ctas_per_request: int
    """CTAs that resolve and copy one request together (a cluster)."""

    gate_width: int
    """CTAs of the device that may copy at a time; 0: all."""


def launch_shape(batch: int) -> LaunchShape:
    if batch <= 8:
        return LaunchShape(1024, 8, 0)
    if batch <= 16:
        return LaunchShape(1024, 4, 16)
    if batch <= 64:
        return LaunchShape(1024, 2, 16)
    return LaunchShape(1024 if batch <= 132 else 512, 1, 8)


def swap_in(
    *,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    num_real_reqs: torch.Tensor,
    req_to_token: torch.Tensor,
    host_rows: torch.Tensor,
    hot_rows: torch.Tensor,
    owners: torch.Tensor,
    lru_order: torch.Tensor,
    tail_start: torch.Tensor,
    page_size: int,
    out: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """See `reference.swap_in`. `host_rows` is pinned memory; rows may lie further apart than `row_bytes`."""
    check = LaunchChecks("swap_in", hot_rows.device)
    check.tensor("selected", selected, INT32, "batch", "top_k")
    check.tensor("out", out, INT32, "batch", "top_k")
    check.contiguous("seq_lens", seq_lens, INT32_OR_64, "batch")
    check.contiguous("req_pool_indices", req_pool_indices, INT32_OR_64, "batch")
    check.contiguous("num_real_reqs", num_real_reqs, INT32, 1)
    check.contiguous("owners", owners, INT32, "regions", "device_buffer_size")
    check.contiguous("lru_order", lru_order, (torch.int16,), "regions", "device_buffer_size")
    check.contiguous("tail_start", tail_start, INT32, "regions")
    check.tensor("req_to_token", req_to_token, INT32, "request slots", "max_context")
    check.contiguous("counters", counters, (torch.int64,), 3)
    check.device_rows("hot_rows", hot_rows, "hot rows")
    check.host_rows("host_rows", host_rows, "slots")
    _check_regions(check, page_size)
    check.require(
        check["request slots"] >= check["regions"],
        f"req_to_token must have a row for each of the {check['regions']} regions, has {check['request slots']}",
    )
    check.require(
        1 <= check["top_k"] <= check["device_buffer_size"],
        f"top_k must be 1 to device_buffer_size = {check['device_buffer_size']}, got {check['top_k']}",
    )
    if check["batch"] == 0:
        return out
    shape = launch_shape(check["batch"])
    cuda_module().swap_in(
        selected,
        seq_lens,
        req_pool_indices,
        num_real_reqs,
        req_to_token,
        host_rows,
        hot_rows,
        owners,
        lru_order,
        tail_start,
        page_size,
        out,
        counters,
        *shape,
        _stream(hot_rows),
    )
    return out


def store_decode(
    *,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    num_real_reqs: torch.Tensor,
    host_rows: torch.Tensor,
    hot_rows: torch.Tensor,
    device_buffer_size: int,
    page_size: int,
    row_format: RowFormat,
) -> None:
    """See `reference.store_decode`. Packing is fused; fp8 bits are those of SGLang's own fp8 store."""
    check = LaunchChecks("store_decode", hot_rows.device)
    k_nope = check.part("k_nope", k_nope, "tokens", row_format.nope_dim)
    k_rope = check.part("k_rope", k_rope, "tokens", row_format.rope_dim)
    check.contiguous("slots", slots, INT32_OR_64, "tokens")
    check.contiguous("seq_lens", seq_lens, INT32_OR_64, "tokens")
    check.contiguous("req_pool_indices", req_pool_indices, INT32_OR_64, "tokens")
    check.contiguous("num_real_reqs", num_real_reqs, INT32, 1)
    check.device_rows("hot_rows", hot_rows, "hot rows")
    check.host_rows("host_rows", host_rows, "slots")
    _check_row_format(check, row_format)
    check.require(
        device_buffer_size >= 1 and page_size >= 1 and check["hot rows"] % (device_buffer_size + page_size) == 0,
        f"hot_rows has {check['hot rows']} rows, not a multiple of device_buffer_size + page_size = "
        f"{device_buffer_size} + {page_size}",
    )
    cuda_module().store_decode(
        k_nope,
        k_rope,
        slots,
        seq_lens,
        req_pool_indices,
        num_real_reqs,
        host_rows,
        hot_rows,
        device_buffer_size,
        page_size,
        isinstance(row_format, Fp8DsMlaRow),
        _stream(hot_rows),
    )


def store_extend(
    *,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    row_ids: torch.Tensor,
    host_rows: torch.Tensor,
    workspace: torch.Tensor,
    row_format: RowFormat,
) -> None:
    """See `reference.store_extend`. Packing is fused; fp8 bits are those of SGLang's own fp8 store."""
    check = LaunchChecks("store_extend", workspace.device)
    k_nope = check.part("k_nope", k_nope, "tokens", row_format.nope_dim)
    k_rope = check.part("k_rope", k_rope, "tokens", row_format.rope_dim)
    check.contiguous("slots", slots, INT32_OR_64, "tokens")
    check.contiguous("row_ids", row_ids, INT32_OR_64, "tokens")
    check.device_rows("workspace", workspace, "workspace rows")
    check.host_rows("host_rows", host_rows, "slots")
    _check_row_format(check, row_format)
    fp8 = isinstance(row_format, Fp8DsMlaRow)
    cuda_module().store_extend(k_nope, k_rope, slots, row_ids, host_rows, workspace, fp8, _stream(workspace))


def gather(*, host_rows: torch.Tensor, slots: torch.Tensor, workspace: torch.Tensor, row_ids: torch.Tensor) -> None:
    """See `reference.gather`."""
    check = LaunchChecks("gather", workspace.device)
    check.contiguous("slots", slots, INT32_OR_64, "rows")
    check.contiguous("row_ids", row_ids, INT32_OR_64, "rows")
    check.device_rows("workspace", workspace, "workspace rows")
    check.host_rows("host_rows", host_rows, "slots")
    chunks = check["rows"] * check["row_bytes"] // 16
    check.require(chunks < 2**31, f"at most 2**31 chunks of 16 bytes a launch, got {chunks}")
    cuda_module().gather(host_rows, slots, workspace, row_ids, GATHER_CTAS, _stream(workspace))


def seed(
    *,
    candidates: torch.Tensor,
    regions: torch.Tensor,
    workspace_starts: torch.Tensor,
    workspace: torch.Tensor,
    hot_rows: torch.Tensor,
    owners: torch.Tensor,
    lru_order: torch.Tensor,
    page_size: int,
) -> None:
    """See `reference.seed`. At most 32,767 candidates a request."""
    check = LaunchChecks("seed", hot_rows.device)
    check.tensor("candidates", candidates, INT32, "requests", "candidates")
    check.contiguous("regions", regions, INT32_OR_64, "requests")
    check.contiguous("workspace_starts", workspace_starts, INT32_OR_64, "requests")
    check.contiguous("owners", owners, INT32, "regions", "device_buffer_size")
    check.contiguous("lru_order", lru_order, (torch.int16,), "regions", "device_buffer_size")
    check.device_rows("workspace", workspace, "workspace rows")
    check.device_rows("hot_rows", hot_rows, "hot rows")
    _check_regions(check, page_size)
    check.require(
        check["candidates"] <= MAX_SEED_CANDIDATES,
        f"at most {MAX_SEED_CANDIDATES} candidates a request, got {check['candidates']}",
    )
    cuda_module().seed(
        candidates,
        regions,
        workspace_starts,
        workspace,
        hot_rows,
        owners,
        lru_order,
        page_size,
        SEED_CTAS,
        _stream(hot_rows),
    )


def reset(
    *,
    owners: torch.Tensor,
    lru_order: torch.Tensor,
    tail_start: torch.Tensor,
    regions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """See `reference.reset`."""
    check = LaunchChecks("reset", owners.device)
    check.contiguous("owners", owners, INT32, "layers", "regions", "device_buffer_size")
    check.contiguous("lru_order", lru_order, (torch.int16,), "layers", "regions", "device_buffer_size")
    check.contiguous("tail_start", tail_start, INT32, "regions")
    check.contiguous("regions", regions, INT32_OR_64, "requests")
    check.contiguous("seq_lens", seq_lens, INT32_OR_64, "requests")
    cuda_module().reset(owners, lru_order, tail_start, regions, seq_lens, _stream(owners))


def _check_regions(check: LaunchChecks, page_size: int) -> None:
    """`hot_rows` is made of regions, and their size and number fit the types that count them."""
    buffer, regions, rows = check["device_buffer_size"], check["regions"], check["hot rows"]
    check.require(1 <= buffer <= MAX_LRU_ROWS, f"device_buffer_size must be 1 to {MAX_LRU_ROWS}, got {buffer}")
    check.require(page_size >= 1, f"page_size must be positive, got {page_size}")
    check.require(
        rows == regions * (buffer + page_size),
        f"hot_rows must have regions * (device_buffer_size + page_size) = {regions} * ({buffer} + {page_size}) rows, "
        f"has {rows}",
    )
    check.require(rows < 2**31, f"hot rows are numbered in int32, got {rows} of them")


def _check_row_format(check: LaunchChecks, row_format: RowFormat) -> None:
    if not isinstance(row_format, Bf16Row | Fp8DsMlaRow):
        raise TypeError(f"no CUDA store packs rows of format {row_format.name}, only bf16 and fp8_ds_mla")
    check.require(
        check["row_bytes"] == row_format.row_bytes,
        f"rows of format {row_format.name} have {row_format.row_bytes} bytes, the tensors' {check['row_bytes']}",
    )


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream
