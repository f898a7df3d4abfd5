"""Pool sizes: how many slots and regions this process gets. Runs where SGLang would size its device pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.model_config import get_dsa_index_head_dim
from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator
from sglang.srt.runtime_context import get_context, get_schedule

from hisparse.budget import plan_budget
from hisparse.config import HiSparseError
from hisparse.memory import free_memory_bytes, require_free_memory
from hisparse.plugin.gate import stopping_the_server
from hisparse.plugin.server_args import active_config, processes_per_host


class HiSparsePoolConfigurator(MemoryPoolConfigurator):
    """SGLang's sizing contract, answered from host memory. SGLang caps the result by --max-total-tokens afterwards."""

    def __init__(self, kv_cache_configurator: Any) -> None:
        self.owner = kv_cache_configurator

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        owner = self.owner
        config = active_config(owner.server_args)
        assert config is not None and page_size == config.page_size, (config, page_size)
        requests = get_schedule().max_running_requests
        free = least_of_all_ranks(free_memory_bytes())
        processes = processes_per_host(owner.server_args)
        with stopping_the_server():
            budget = plan_budget(
                config,
                layers=owner.layer_info.num_effective_layers,
                row_bytes=row_bytes(owner),
                index_key_bytes=index_key_bytes(owner.model_config),
                device_bytes=available_bytes,
                free_host_bytes=free // processes,
                max_requests=None if requests is None else max(1, requests // owner.ps.attn_dp_size),
            )
            limit = get_schedule().max_total_tokens
            slots = budget.slots if limit is None else min(budget.slots, limit)
            # Only the ranks that measured together: another replica of the model may have taken its memory already.
            require_free_memory(
                replace(budget, slots=slots).host_pool_bytes,
                processes=min(processes, owner.server_args.tp_size),
                free=free,
            )
        if requests is None:
            # SGLang's default of 2,048 and more would be as many regions.
            get_context().override(
                "hisparse.regions", max_running_requests=(budget.regions - 1) * owner.ps.attn_dp_size
            )
        return MemoryPoolConfig(max_total_num_tokens=budget.slots)

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        slots = max_total_num_tokens // page_size * page_size
        with stopping_the_server():
            if slots == 0:
                raise HiSparseError(
                    f"--max-total-tokens {max_total_num_tokens} does not fit --enable-hisparse: it must be at least "
                    f"{page_size}, one page."
                )
        return MemoryPoolConfig(max_total_num_tokens=slots)


def least_of_all_ranks(nbytes: int) -> int:
    """The smallest of what the ranks of this server measured. Ranks that share requests must agree on the size of their
    pools, or they admit and retract differently; free memory changes while the others start."""
    world = get_world_group()
    if world.world_size == 1:
        return nbytes
    least = torch.tensor(nbytes, dtype=torch.int64)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=world.cpu_group)
    return int(least)


def row_bytes(owner: Any) -> int:
    """Bytes of a token's row in one layer, by SGLang's own layout of the chosen --kv-cache-dtype."""
    values = calculate_mla_kv_cache_dim(
        model_config=owner.model_config, kv_cache_dtype=owner.kv_cache_dtype, server_args=owner.server_args
    )
    return values * owner.kv_cache_dtype.itemsize


def index_key_bytes(model_config: Any) -> int:
    """Bytes of a token's indexer key in one layer: fp8 values and a float32 scale for each 128 of them."""
    dim = get_dsa_index_head_dim(model_config.hf_config)
    return dim + dim // DSATokenToKVPool.quant_block_size * 4
