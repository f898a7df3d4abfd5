"""Where every byte goes: the arithmetic that sizes the pools, and the table that explains it at start-up."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.config import HiSparseError, ResolvedConfig

GIB = 2**30

BATCH_ALIGNMENT = 64
"""SGLang pads decode batches to multiples of its attention-parallel sizes, which divide this."""

DEFAULT_MAX_REQUESTS = 256
"""Regions when --max-running-requests is not given and the device memory holds that many."""

DEFAULT_REGIONS_SHARE = 0.5
"""Share of the device memory that the regions may take when --max-running-requests is not given."""

DEFAULT_HOST_SHARE = 0.5
"""Share of the free host memory that the host pool takes when neither its size nor a ratio is given."""


@dataclass(frozen=True)
class MemoryBudget:
    """Sizes of one process's pools.

    Attributes:
        layers: sparse-attention layers of this process.
        row_bytes: a token's row in one layer. index_key_bytes: a token's indexer key and scale in one layer.
        regions: requests that can run at once, plus SGLang's padding region.
        slots: tokens the host pool holds, without SGLang's padding page.
    """

    config: ResolvedConfig
    layers: int
    row_bytes: int
    index_key_bytes: int
    regions: int
    slots: int

    @property
    def region_bytes(self) -> int:
        """One request's rows and residency state (owner int32, LRU order int16 a row) in all layers, tail start."""
        return region_bytes(self.config, self.layers, self.row_bytes)

    @property
    def hot_rows_bytes(self) -> int:
        return self.layers * self.regions * self.config.region_rows * self.row_bytes

    @property
    def residency_bytes(self) -> int:
        return self.regions * self.region_bytes - self.hot_rows_bytes

    @property
    def workspace_bytes(self) -> int:
        return self.config.workspaces * self.config.workspace_tokens * self.row_bytes

    @property
    def max_batch(self) -> int:
        """Rows of the largest decode batch, padding included."""
        return -(-self.regions // BATCH_ALIGNMENT) * BATCH_ALIGNMENT

    @property
    def step_bytes(self) -> int:
        """The step's row ids (int32 [max_batch, top_k]), counters (int64 [layers, 3]) and batch size."""
        return 4 * self.max_batch * self.config.top_k + 24 * self.layers + 4

    @property
    def trace_bytes(self) -> int:
        """Selections of a step, int32 [recorded layers, max_batch, top_k], while a trace is recorded."""
        trace = self.config.trace
        if trace is None:
            return 0
        layers = self.layers if trace.layers is None else min(self.layers, len(trace.layers))
        return 4 * layers * self.max_batch * self.config.top_k

    @property
    def index_keys_bytes(self) -> int:
        return self.layers * (self.slots + self.config.page_size) * self.index_key_bytes

    @property
    def host_pool_bytes(self) -> int:
        return self.layers * (self.slots + self.config.page_size) * self.row_bytes

    @property
    def device_bytes(self) -> int:
        regions = self.hot_rows_bytes + self.residency_bytes
        return regions + self.workspace_bytes + self.step_bytes + self.trace_bytes + self.index_keys_bytes

    def table(self, processes: int = 1) -> str:
        """One line a part, for the log. `processes`: of this host, each with pools of this size."""
        config = self.config
        tokens = self.slots + config.page_size
        lines = [
            ("device", "hot rows", self.hot_rows_bytes,
             f"{self.regions} regions x ({config.device_buffer_size} + {config.page_size}) rows x {self.layers} layers "
             f"x {self.row_bytes} B"),
            ("device", "residency state", self.residency_bytes, "6 B a row, 4 B a region"),
            ("device", "prefill workspace", self.workspace_bytes,
             f"{config.workspaces} x {config.workspace_tokens} rows x {self.row_bytes} B"),
            ("device", "step buffers", self.step_bytes, "row ids and counters"),
            ("device", "indexer keys", self.index_keys_bytes,
             f"{tokens} tokens x {self.layers} layers x {self.index_key_bytes} B"),
            ("device", "total", self.device_bytes, ""),
            ("host", "host pool", self.host_pool_bytes, f"{tokens} tokens x {self.layers} layers x {self.row_bytes} B"),
        ]  # fmt: skip
        if self.trace_bytes:
            lines.insert(4, ("device", "trace", self.trace_bytes, "selections of a step in the recorded layers"))
        if processes > 1:
            lines.append(("host", "host total", processes * self.host_pool_bytes,
                          f"{processes} processes on this host, each with a host pool of its own"))  # fmt: skip
        head = f"HiSparse: {self.regions - 1} requests at once, {self.slots} tokens"
        rows = (f"  {where:<7}{what:<18}{nbytes / GIB:>10.3f} GiB  {how}" for where, what, nbytes, how in lines)
        return "\n".join([head, *(row.rstrip() for row in rows)])


def region_bytes(config: ResolvedConfig, layers: int, row_bytes: int) -> int:
    """Device bytes of one region: rows, owners (int32) and LRU order (int16) in every layer, and tail_start (int32)."""
    return layers * (config.region_rows * row_bytes + 6 * config.device_buffer_size) + 4


def plan_budget(
    config: ResolvedConfig,
    *,
    layers: int,
    row_bytes: int,
    index_key_bytes: int,
    device_bytes: int,
    free_host_bytes: int,
    max_requests: int | None,
) -> MemoryBudget:
    """Size the pools of one process.

    Args:
        device_bytes: device memory for KV: what SGLang would give its own pool.
        free_host_bytes: this process's part of the free host memory; used where the user gave no size.
        max_requests: `--max-running-requests` of this process, None = not given.

    Raises:
        HiSparseError: the device memory does not hold the regions and the workspace, or no page is left.
    """
    one_region = region_bytes(config, layers, row_bytes)
    if max_requests is None:
        affordable = int(device_bytes * DEFAULT_REGIONS_SHARE) // one_region - 1
        max_requests = max(1, min(DEFAULT_MAX_REQUESTS, affordable))
    regions = max_requests + 1
    empty = MemoryBudget(config, layers, row_bytes, index_key_bytes, regions, slots=0)
    if empty.device_bytes > device_bytes:
        raise HiSparseError(
            f"{max_requests} requests need {empty.device_bytes / GIB:.3f} GiB of device memory "
            f"({one_region / GIB:.4f} GiB a region, {empty.workspace_bytes / GIB:.3f} GiB of workspace) but "
            f"{device_bytes / GIB:.3f} GiB are available; lower "
            + (
                "--context-length or --hisparse-config workspace_tokens"
                if empty.workspace_bytes > device_bytes // 2
                else "--max-running-requests or --hisparse-config device_buffer_size"
            )
            + ", or raise --mem-fraction-static."
        )
    on_device = (device_bytes - empty.device_bytes) // (layers * index_key_bytes)
    if config.host_memory_bytes is not None:
        in_host = config.host_memory_bytes // (layers * row_bytes) - config.page_size
    elif config.host_to_device_ratio is not None:
        without_hisparse = device_bytes // (layers * (row_bytes + index_key_bytes))
        in_host = int(config.host_to_device_ratio * without_hisparse)
    else:
        in_host = int(free_host_bytes * DEFAULT_HOST_SHARE) // (layers * row_bytes) - config.page_size
    slots = min(on_device, in_host) // config.page_size * config.page_size
    if slots < config.page_size:
        raise HiSparseError(
            f"no room for a single page of {config.page_size} tokens: the host pool may hold {max(in_host, 0)} tokens "
            f"and the device memory {max(on_device, 0)} indexer keys; raise --hisparse-config host_memory_gib or "
            f"--mem-fraction-static."
        )
    return MemoryBudget(config, layers, row_bytes, index_key_bytes, regions, slots)
