"""SGLang's DSA attention back end over our rows: prefill through the workspace, decode over the hot buffer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, concat_mla_absorb_q_general

from hisparse.coordinator import HiSparseCoordinator
from hisparse.extend_plan import ExtendGroup
from hisparse.plugin.top_k import PositionTopK


class HiSparseAttentionBackend(DeepseekSparseAttnBackend):
    """Kernels, metadata, indexer and CUDA graphs are SGLang's; where rows come from is ours."""

    hisparse_coordinator: HiSparseCoordinator

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_decode():
            # SGLang has counted the rows that it pads a batch with for data-parallel attention.
            real = getattr(forward_batch, "_original_batch_size", None)
            self.hisparse_coordinator.num_real_reqs.fill_(forward_batch.batch_size if real is None else real)
        if forward_batch.forward_mode.is_extend():
            self._groups = self.hisparse_coordinator.begin_extend(
                req_pool_indices=forward_batch.req_pool_indices,
                prefix_lens=list(forward_batch.extend_prefix_lens_cpu),
                extend_lens=list(forward_batch.extend_seq_lens_cpu),
                out_cache_loc=forward_batch.out_cache_loc,
            )

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        """Positions, never slots: SGLang's fused top-k would look slots up in a page table of the full pool."""
        metadata = super().get_indexer_metadata(layer_id, forward_batch)
        return dataclasses.replace(metadata, topk_backend=PositionTopK(self.dsa_topk_backend, self.use_fused_topk))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Without the page table of single tokens, int32 [max_bs, context], that SGLang refills in every step where
        a coordinator is set: swap-in reads `req_to_token`."""
        coordinator = self.hisparse_coordinator
        self.hisparse_coordinator = None  # type: ignore[assignment]
        try:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
        finally:
            self.hisparse_coordinator = coordinator

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the new rows through, then let SGLang swap in (it calls the coordinator) and attend."""
        if save_kv_cache and k is not None:
            assert k_rope is not None, "rotary keys come apart from the latent in absorbed MLA"
            self.hisparse_coordinator.store_decode(
                layer.layer_id,
                k_nope=k,
                k_rope=k_rope,
                slots=forward_batch.out_cache_loc,
                req_pool_indices=forward_batch.req_pool_indices,
                seq_lens=forward_batch.seq_lens,
            )
        out = super().forward_decode(
            q, None, None, layer, forward_batch, save_kv_cache=False, q_rope=q_rope, k_rope=None, **kwargs
        )
        self._check_output(out)
        return out

    def _forward_flashmla_sparse(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.hisparse_coordinator.join_decode()
        return super()._forward_flashmla_sparse(*args, **kwargs)

    def _forward_flashmla_kv(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.hisparse_coordinator.join_decode()
        return super()._forward_flashmla_kv(*args, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer of a prefill batch, group by group.

        Args:
            q, q_rope: [tokens, heads, kv_lora_rank] and [tokens, heads, rope_dim], possibly flattened.
            k, k_rope: bf16 [tokens, 1, kv_lora_rank] and [tokens, 1, rope_dim].
            topk_indices: int32 [tokens, top_k] positions in the token's own request, -1 = none.

        Returns:
            [tokens, heads, kv_lora_rank]; zero for padding tokens behind the last request's.
        """
        assert save_kv_cache and topk_indices is not None, "not a sparse prefill"
        assert q_rope is not None and k_rope is not None, "not an absorbed MLA prefill"
        coordinator, heads = self.hisparse_coordinator, layer.tp_q_head_num
        q = q.view(-1, heads, layer.v_head_dim)
        q_rope = q_rope.view(-1, heads, layer.head_dim - layer.v_head_dim)
        topk_indices = self._pad_topk_indices(topk_indices, q.shape[0])
        whole = len(self._groups) == 1 and self._groups[0].tokens == slice(0, q.shape[0])
        out = torch.empty(0) if whole else torch.zeros_like(q)
        for group in self._groups:
            rows = coordinator.fill_workspace(layer.layer_id, group, k, k_rope)
            selected = topk_indices[group.tokens]
            alone = group.regions.shape[0] == 1  # then it begins at row 0
            row_ids = selected if alone else torch.where(selected >= 0, selected + group.token_starts, -1)
            q_all = concat_mla_absorb_q_general(q[group.tokens], q_rope[group.tokens])
            attended = self._attend_workspace(layer, group, q_all, self.token_to_kv_pool.as_kv_cache(rows), row_ids)
            attended = attended.view(-1, heads, layer.v_head_dim)
            if whole:
                out = attended
            else:
                out[group.tokens] = attended
            coordinator.seed_regions(layer.layer_id, group, rows, selected)
        self._check_output(out)
        return out

    def _attend_workspace(
        self, layer: Any, group: ExtendGroup, q_all: torch.Tensor, kv_cache: torch.Tensor, row_ids: torch.Tensor
    ) -> torch.Tensor:
        arguments = dict(q_all=q_all, kv_cache=kv_cache, page_table_1=row_ids, sm_scale=layer.scaling,
                         v_head_dim=layer.v_head_dim)  # fmt: skip
        if self.dsa_prefill_impl == "flashmla_sparse":
            return self._forward_flashmla_sparse(**arguments)
        assert self.dsa_prefill_impl == "flashmla_kv", self.dsa_prefill_impl
        metadata = self.forward_metadata
        if q_all.shape[0] != metadata.dsa_cache_seqlens_int32.shape[0]:
            lengths = metadata.dsa_cache_seqlens_int32[group.tokens]
            metadata = SimpleNamespace(
                dsa_cache_seqlens_int32=lengths, flashmla_metadata=self._compute_flashmla_metadata(lengths, 1)
            )
        return self._forward_flashmla_kv(layer=layer, metadata=metadata, **arguments)

    def _check_output(self, out: torch.Tensor) -> None:
        if self.hisparse_coordinator.debug:
            assert not bool(torch.isnan(out).any()), "attention read a row that holds nothing (poisoned)"
