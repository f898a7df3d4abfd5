"""SGLang's own swap-in kernel, for comparison. From the installed sglang package, through its Python wrapper."""

from __future__ import annotations

import torch

from hisparse.bench.setup import DEVICE, TOP_K, Layer, Steps

PEER_BLOCK_SIZE = 960
"""The default of SGLang 0.5.17's HiSparse coordinator."""


class Peer:
    """SGLang's swap-in over the same rows: its hot rows are ours, its state is its own."""

    def __init__(self, layer: Layer, steps: Steps) -> None:
        from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_mla

        self._run = load_cache_to_device_buffer_mla
        self._layer, self._steps = layer, steps
        shape = (layer.regions, layer.region_rows)
        self._tokens = torch.full(shape, -1, dtype=torch.int32, device=DEVICE)
        self._locs = torch.arange(layer.regions * layer.region_rows, dtype=torch.int32, device=DEVICE).view(shape)
        self._lru = torch.arange(layer.buffer, device=DEVICE).short().repeat(layer.regions, 1)

    def swap_in(self, i: int) -> None:
        layer, steps = self._layer, self._steps
        self._run(
            top_k_tokens=steps.selected[i],
            device_buffer_tokens=self._tokens,
            host_cache_locs=layer.req_to_host,
            device_buffer_locs=self._locs,
            host_cache=layer.host,
            device_buffer=layer.hot,
            top_k_device_locs=steps.out,
            req_pool_indices=steps.req_pool_indices,
            seq_lens=steps.seq_lens,
            lru_slots=self._lru,
            item_size_bytes=layer.row_bytes,
            num_top_k=TOP_K,
            hot_buffer_size=layer.buffer,
            page_size=1,
            block_size=PEER_BLOCK_SIZE,
            num_real_reqs=steps.num_real_reqs,
        )
