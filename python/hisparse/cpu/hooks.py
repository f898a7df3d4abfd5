"""Every SGLang function that has no CPU version on the DSA path, and ours that stands in for it."""

from typing import Any

from hisparse.cpu import (
    allocation,
    index_buffer,
    indexer,
    page_table,
    quantize,
    ranks,
    rotary,
    row_store,
    sparse_attention,
    top_k,
)
from hisparse.hook_row import HookRow

_DSA = "sglang.srt.layers.attention.dsa."
_DSA_OPS = "sglang.kernels.ops.attention.dsa."
_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator."
_ALLOCATOR = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."


def _no_triton(backend: Any) -> bool:
    return False


# SetKAndS.triton and GetKAndS.triton are class methods; ours take no class.
def _set_k_and_s(cls: type, *args: Any, **kwargs: Any) -> None:
    index_buffer.set_k_and_s(*args, **kwargs)


def _get_k_and_s(cls: type, *args: Any, **kwargs: Any) -> Any:
    return index_buffer.get_k_and_s(*args, **kwargs)


CPU_HOOKS: tuple[HookRow, ...] = (
    HookRow(
        _DSA + "dsa_indexer.Indexer.forward_native",
        "replace",
        indexer.indexer_forward,
        "raises: the indexer is written for CUDA, HIP and NPU",
    ),
    HookRow(
        _DSA + "dsa_indexer.rotate_activation",
        "replace",
        quantize.hadamard,
        "calls a JIT-compiled CUDA kernel",
    ),
    HookRow(
        _DSA + "dsa_topk_backend._topk_unfused",
        "replace",
        top_k.topk_unfused,
        "torch.topk breaks ties by the batch's longest request; a request's tokens must not depend on its neighbours",
    ),
    HookRow(
        _DSA_OPS + "index_buf_accessor.SetKAndS.triton",
        "replace",
        _set_k_and_s,
        "Triton kernel",
    ),
    HookRow(
        _DSA_OPS + "index_buf_accessor.GetKAndS.triton",
        "replace",
        _get_k_and_s,
        "Triton kernel",
    ),
    HookRow(
        _DSA_OPS + "transform_index.transform_index_page_table_decode",
        "replace",
        page_table.decode_slots,
        "Triton kernel, for top-k 2,048 only",
    ),
    HookRow(
        _DSA_OPS + "transform_index.transform_index_page_table_prefill",
        "replace",
        page_table.prefill_slots,
        "Triton kernel, for top-k 2,048 only",
    ),
    HookRow(
        "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_flashmla_sparse",
        "replace",
        sparse_attention.forward_flashmla_sparse,
        "FlashMLA is CUDA; its wrapper also pads every query to 64 heads",
    ),
    HookRow(
        "sglang.srt.layers.rotary_embedding.rope_variant.DeepseekScalingRotaryEmbedding.forward_native",
        "replace",
        rotary.deepseek_rope,
        "does not accept the indexer's keys, which have no head dimension",
    ),
    HookRow(
        "sglang.srt.mem_cache.memory_pool.set_mla_kv_buffer_triton",
        "replace",
        row_store.set_rows,
        "Triton kernel",
    ),
    HookRow(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        "replace",
        page_table.last_slot,
        "Triton kernel",
    ),
    HookRow(_ALLOCATOR + "alloc_extend", "replace", allocation.alloc_extend, "Triton kernel"),
    HookRow(_ALLOCATOR + "alloc_decode", "replace", allocation.alloc_decode, "Triton kernel"),
    HookRow(
        "sglang.srt.utils.common.support_triton",
        "replace",
        _no_triton,
        "answers yes for the dsa back end; the callers have torch versions",
    ),
    HookRow(
        "sglang.srt.utils.numa_utils.init_threads_binding",
        "around",
        ranks.init_threads_binding,
        "without SGLANG_CPU_OMP_THREADS_BIND it stops unless every rank has a NUMA node of its own",
    ),
    HookRow(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
        "around",
        ranks.prepare_mlp_sync_batch,
        "with data-parallel attention it asks for pinned memory, which needs a driver",
    ),
    HookRow(
        "sglang.kernels.ops.memory.memcpy_triton.memcpy_triton",
        "replace",
        ranks.copy_rows,
        "Triton kernel",
    ),
    HookRow(
        _GROUP + "all_gather_into_tensor",
        "replace",
        ranks.all_gather_into_tensor,
        "goes through an operator that is registered for accelerators alone",
    ),
    HookRow(
        _GROUP + "reduce_scatter_tensor",
        "replace",
        ranks.reduce_scatter_tensor,
        "goes through an operator that is registered for accelerators alone",
    ),
)
