"""SGLang's DSA pool with its rows in the host pool."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from hisparse.coordinator import POISON
from hisparse.memory import HostPool, HotBuffer
from hisparse.plugin.gate import stopping_the_server
from hisparse.row_format import Bf16Row, Fp8DsMlaRow, RowFormat


class HiSparseNSATokenToKVPool(DSATokenToKVPool):
    """Host rows and device indexer keys by slot; device rows are the coordinator's hot buffer.

    SGLang's allocator, radix tree and leak check see an ordinary pool of `size` tokens. Attention reads rows through
    `get_key_buffer`, which hands out the hot buffer: valid in decode, after swap-in. Prefill reads the workspace and
    never comes here. Rows are written by the attention back end, through the coordinator.
    """

    host_pool: HostPool
    hot_buffer: HotBuffer | None = None
    retractions: int = 0
    """Requests that lost their slots to others in decode."""
    debug = False

    @property
    def row_format(self) -> RowFormat:
        if self.dsa_kv_cache_store_fp8:
            return Fp8DsMlaRow()
        return Bf16Row(self.kv_lora_rank, self.qk_rope_head_dim)

    def as_kv_cache(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as SGLang's kernels take them: uint8 [n, row_bytes] -> `dtype` [n, 1, kv_cache_dim], no copy."""
        return rows.view(self.dtype).unsqueeze(1)

    def poison_pages(self, page_ids: torch.Tensor) -> None:
        """Fill the host rows of freed pages with NaN (`debug`). Waits for the device, whose last step may read them."""
        if page_ids.is_cuda:
            torch.cuda.synchronize(page_ids.device)
        offsets = torch.arange(self.page_size)
        self.host_pool.rows[:, (page_ids.cpu().unsqueeze(1) * self.page_size + offsets).flatten()] = POISON

    # ---- what SGLang calls

    def _create_buffers(self) -> None:
        with stopping_the_server():
            self.host_pool = HostPool(
                layers=self.layer_num,
                slots=self.size + self.page_size,
                row_bytes=self.row_format.row_bytes,
                pin=torch.device(self.device).type == "cuda",
            )
        self.kv_buffer = [rows.view(self.store_dtype).unsqueeze(1) for rows in self.host_pool.rows]

    def get_kv_size_bytes(self) -> int:
        """Device bytes, for SGLang's log and memory report: rows in host memory are not among them."""
        return sum(keys.nbytes for keys in self.index_k_with_scale_buffer)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        assert self.hot_buffer is not None, "rows are read before the coordinator exists"
        return self.as_kv_cache(self.hot_buffer.rows[layer_id - self.start_layer])

    def set_mla_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("rows are written by HiSparseAttentionBackend only")

    set_kv_buffer = get_mla_kv_buffer = get_value_buffer = set_mla_kv_buffer

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("rows need no copy in host memory: they are there")

    load_cpu_copy = get_cpu_copy
