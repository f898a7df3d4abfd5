"""`HiSparseCoordinator`: sole owner of residency state, and the order in which the data plane is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hisparse_kernel as kernel
from hisparse.config import ResolvedConfig
from hisparse.extend_plan import ExtendGroup, plan_extend
from hisparse.memory import HostPool, HotBuffer
from hisparse.recorder import SelectionRecorder
from hisparse.row_format import RowFormat
from hisparse.side_stream import SideStream
from hisparse.swap_in_timer import SwapInTimer
from hisparse.workspace import Workspace

SEED_QUERIES = 4
"""Queries of a prompt's end whose selections seed its region; the last one's alone leave half of a buffer of twice
top-k empty."""

MAX_SEED_CANDIDATES = 32_767
"""Positions that `kernel.seed` takes a request."""

POISON = 0xFF
"""A byte that makes NaN of every value of every row format (bf16, float8_e4m3fn, float32)."""


class HiSparseCoordinator:
    """Keeps the rows a decode step reads on the device and everything else in the host pool.

    One object a model runner. A request needs no admission and no release: its region is its `req_pool_idx`, every
    extend (first prefill, chunk, prefix hit, restart after retraction) resets it, and the host pool already holds
    every row, so abort, finish, retraction and reuse leave nothing to undo.

    Layer ids are SGLang's, global; `start_layer` is the first one of this process.

    Args:
        host_pool, hot_buffer: [layers] of this process each.
        workspace: uint8 [buffers, config.workspace_tokens, row_bytes] on the device, see `Workspace`.
        req_to_token: int32 [regions, max_context], SGLang's table; read, never written.
        max_batch: rows of the largest decode batch, SGLang's padding included.
        debug: fill rows that hold nothing with NaN and verify every row that swap-in returns (slow).

    Attributes:
        counters: int64 [layers, 3] on the device, entries by kind (TAIL, HIT, MISS) since the start.
        timer, recorder: observers, None = off. Set before CUDA graphs are captured, or graphs leave them out.
    """

    def __init__(
        self,
        *,
        config: ResolvedConfig,
        row_format: RowFormat,
        host_pool: HostPool,
        hot_buffer: HotBuffer,
        workspace: torch.Tensor,
        req_to_token: torch.Tensor,
        start_layer: int,
        max_batch: int,
        debug: bool = False,
    ) -> None:
        layers = host_pool.rows.shape[0]
        assert hot_buffer.rows.shape[0] == layers, f"{hot_buffer.rows.shape[0]} hot layers for {layers} host layers"
        assert hot_buffer.regions == req_to_token.shape[0], (
            f"{hot_buffer.regions} regions, {req_to_token.shape[0]} requests"
        )
        device = hot_buffer.rows.device
        self.config = config
        self.row_format = row_format
        self.host_pool = host_pool
        self.hot_buffer = hot_buffer
        self.workspace = Workspace(workspace, host_pool, POISON if debug else None)
        self.req_to_token = req_to_token
        self.start_layer = start_layer
        self.debug = debug
        # Static tensors: a CUDA graph reads and writes them at replay. SGLang fills num_real_reqs before every step.
        self.num_real_reqs = torch.zeros(1, dtype=torch.int32, device=device)
        self._hot_row_ids = torch.full((max_batch, config.top_k), -1, dtype=torch.int32, device=device)
        self.counters = torch.zeros((layers, 3), dtype=torch.int64, device=device)
        self.timer: SwapInTimer | None = None
        self.recorder: SelectionRecorder | None = None
        self._gathered_tokens = 0
        self._swap_in_beside, self._backup_beside = SideStream(device), SideStream(device)
        self._started: tuple[int, int] | None = None  # layer id, batch rows
        self._stored_tokens = 0
        if debug:
            host_pool.rows.fill_(POISON)
            hot_buffer.rows.fill_(POISON)

    # ---- prefill

    def begin_extend(
        self,
        *,
        req_pool_indices: torch.Tensor,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        out_cache_loc: torch.Tensor,
    ) -> list[ExtendGroup]:
        """Start a prefill batch: its regions forget everything, and its requests get their place in the workspace."""
        hot = self.hot_buffer
        regions = req_pool_indices[: len(extend_lens)]
        lens = torch.tensor(
            [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)], device=regions.device
        )
        kernel.reset(
            owners=hot.owners, lru_order=hot.lru_order, tail_start=hot.tail_start, regions=regions, seq_lens=lens
        )
        if self.debug:
            for region in regions.tolist():
                hot.rows[:, hot.region_rows(region)] = POISON
        if self.recorder is not None:
            self.recorder.begin_extend()
        self._gathered_tokens += sum(prefix_lens)
        self._stored_tokens += sum(extend_lens)
        groups = plan_extend(
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            req_pool_indices=regions,
            out_cache_loc=out_cache_loc,
            req_to_token=self.req_to_token,
            capacity=self.workspace.capacity,
            seed_queries=max(1, min(SEED_QUERIES, MAX_SEED_CANDIDATES // self.config.top_k)),
        )
        self.workspace.begin(groups)
        return groups

    def fill_workspace(
        self, layer_id: int, group: ExtendGroup, k_nope: torch.Tensor, k_rope: torch.Tensor
    ) -> torch.Tensor:
        """One layer's rows of a group: prefix from the host pool, new tokens written through to it.

        Every layer must ask for the batch's groups in order.

        Args:
            k_nope, k_rope: bf16 [batch tokens, ...], the whole batch's new tokens.

        Returns:
            The workspace, uint8 [workspace_tokens, row_bytes].
        """
        layer = self._local(layer_id)
        rows = self.workspace.prefix(layer, group)
        kernel.store_extend(
            k_nope=k_nope[group.tokens],
            k_rope=k_rope[group.tokens],
            slots=group.new_slots,
            row_ids=group.new_rows,
            host_rows=self.host_pool.rows[layer],
            workspace=rows,
            row_format=self.row_format,
        )
        return rows

    def seed_regions(self, layer_id: int, group: ExtendGroup, rows: torch.Tensor, selected: torch.Tensor) -> None:
        """Keep what the group's last queries selected, while the workspace still holds this layer.

        Args:
            rows: what `fill_workspace` returned.
            selected: int32 [group tokens, top_k] positions, -1 = none.
        """
        layer, hot = self._local(layer_id), self.hot_buffer
        candidates = selected[group.last_tokens].flatten(1).contiguous()
        if self.recorder is not None:
            self.recorder.on_seed(layer_id, candidates)
        kernel.seed(
            candidates=candidates,
            regions=group.regions,
            workspace_starts=group.starts,
            workspace=rows,
            hot_rows=hot.rows[layer],
            owners=hot.owners[layer],
            lru_order=hot.lru_order[layer],
            page_size=hot.page_size,
        )

    # ---- decode: device work on static tensors only, so that a CUDA graph can hold it

    def store_decode(
        self,
        layer_id: int,
        *,
        k_nope: torch.Tensor,
        k_rope: torch.Tensor,
        slots: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Write each request's new token through to its tail row and its host slot (I1), by `join_decode`."""
        layer, hot = self._local(layer_id), self.hot_buffer
        with self._backup_beside.fork():
            kernel.store_decode(
                k_nope=k_nope,
                k_rope=k_rope,
                slots=slots,
                seq_lens=seq_lens,
                req_pool_indices=req_pool_indices,
                num_real_reqs=self.num_real_reqs,
                host_rows=self.host_pool.rows[layer],
                hot_rows=hot.rows[layer],
                device_buffer_size=hot.device_buffer_size,
                page_size=hot.page_size,
                row_format=self.row_format,
            )

    def start_swap_in(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, selected: torch.Tensor, layer_id: int
    ) -> None:
        """Let `swap_in_selected_pages`, with the same arguments, begin as soon as the selection is known.

        On a GPU it then runs beside the query's projections, which lie between the indexer and attention. What it reads
        was complete before this step, apart from this step's own token, which needs no copy: its row is in the tail
        ring.
        """
        if self._swap_in_beside.is_real:
            with self._swap_in_beside.fork():
                self._started = layer_id, self._swap_in(req_pool_indices, seq_lens, selected, layer_id).shape[0]

    def swap_in_selected_pages(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, selected: torch.Tensor, layer_id: int
    ) -> torch.Tensor:
        """Hot rows of the selected positions, int32 [batch, top_k]; SGLang's decode calls it in place of its
        page-table transform. Filled in by `join_decode`, valid until the next call.

        Args:
            req_pool_indices, seq_lens: int [batch]. selected: int32 [batch, top_k] positions, -1 = none.
        """
        started, self._started = self._started, None
        if started is not None and started[0] == layer_id:
            row_ids = self._hot_row_ids[: selected.shape[0]]
            padding = row_ids[started[1] :]  # where SGLang padded the batch after the indexer
            if len(padding):
                padding.fill_(-1)
        else:
            self._swap_in_beside.join()
            row_ids = self._swap_in(req_pool_indices, seq_lens, selected, layer_id)
        if self.debug:
            self.join_decode()
            self._verify(self._local(layer_id), req_pool_indices, seq_lens, selected, row_ids)
        return row_ids

    def join_decode(self) -> None:
        """From here on the current stream sees the rows of `store_decode` and of `swap_in_selected_pages`.

        The last moment is best: on a GPU the query is put together while rows are still on their way.
        """
        self._swap_in_beside.join()
        self._backup_beside.join()

    def _swap_in(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, selected: torch.Tensor, layer_id: int
    ) -> torch.Tensor:
        layer, hot = self._local(layer_id), self.hot_buffer
        timer = self.timer if self.timer is not None and self.timer.layer == layer else None
        if self.recorder is not None:
            self.recorder.on_select(layer_id, selected)
        if timer is not None:
            timer.start()
        row_ids = kernel.swap_in(
            selected=selected,
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            num_real_reqs=self.num_real_reqs,
            req_to_token=self.req_to_token,
            host_rows=self.host_pool.rows[layer],
            hot_rows=hot.rows[layer],
            owners=hot.owners[layer],
            lru_order=hot.lru_order[layer],
            tail_start=hot.tail_start,
            page_size=hot.page_size,
            out=self._hot_row_ids[: selected.shape[0]],
            counters=self.counters[layer],
        )
        if timer is not None:
            timer.stop()
        return row_ids

    def after_decode(self, rids: Sequence[str], seq_lens: torch.Tensor) -> None:
        """A decode step, replayed graph or not, has been launched on the current stream.

        Args:
            rids: the request of each real batch row. seq_lens: int [>= requests] on the device.
        """
        self._stored_tokens += len(rids)
        if self.recorder is not None:
            self.recorder.after_decode(rids, seq_lens)

    def after_extend(self, rids: Sequence[str]) -> None:
        """Likewise for a prefill batch."""
        if self.recorder is not None:
            self.recorder.after_extend(rids)

    def wait_for_pending_backup(self) -> None:
        """SGLang's model runner asks before decode. Nothing is ever pending: backup is write-through."""

    def _local(self, layer_id: int) -> int:
        """Index of a global layer id in this process's tensors."""
        layer = layer_id - self.start_layer
        layers = self.hot_buffer.rows.shape[0]
        assert 0 <= layer < layers, (
            f"layer {layer_id} is not one of {self.start_layer}..{self.start_layer + layers - 1}"
        )
        return layer

    # ---- checks and figures

    def check(self) -> None:
        """Raise AssertionError unless the conservation laws of the residency state hold."""
        self.hot_buffer.check()

    def _verify(
        self,
        layer: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        selected: torch.Tensor,
        row_ids: torch.Tensor,
    ) -> None:
        """Every selected position got a row of its own region that equals its host row, and nothing else got one.
        A host row that is still poison was never backed up, which a miss copies faithfully."""
        region_rows = self.config.region_rows
        for b in range(int(self.num_real_reqs)):
            region, wanted = int(req_pool_indices[b]), selected[b].long()
            valid = (wanted >= 0) & (wanted < int(seq_lens[b]))
            assert torch.equal(row_ids[b] >= 0, valid), f"layer {layer}: request row {b} lost or invented positions"
            rows, slots = row_ids[b][valid].long(), self.req_to_token[region, wanted[valid]].long()
            assert bool((rows // region_rows == region).all()), f"layer {layer}: a row of another region than {region}"
            hot, host = self.hot_buffer.rows[layer][rows], self.host_pool.rows[layer][slots.cpu()].to(rows.device)
            wrong = (hot != host).any(-1)
            assert not bool(wrong.any()), (
                f"layer {layer}, region {region}: hot rows of positions {wanted[valid][wrong].tolist()[:8]} are not "
                f"their host rows"
            )
            unwritten = (host == POISON).all(-1)
            assert not bool(unwritten.any()), (
                f"layer {layer}, region {region}: host rows of positions {wanted[valid][unwritten].tolist()[:8]} were "
                f"never written"
            )

    def statistics(self, counters: torch.Tensor | None = None) -> dict[str, int | float]:
        """Totals since the start over all layers of this process.

        Args:
            counters: a copy of `self.counters` on the host; without one, waits for the device.
        """
        tail, hit, miss = (self.counters if counters is None else counters).sum(0).tolist()
        served = tail + hit + miss
        row_bytes = self.row_format.row_bytes
        return {
            "selected_positions": served,
            "tail_ring_positions": tail,
            "hit_positions": hit,
            "missed_positions": miss,
            "hit_rate": (tail + hit) / served if served else 1.0,
            "swapped_in_bytes": miss * row_bytes,
            "backed_up_bytes": self._stored_tokens * row_bytes * self.counters.shape[0],
            "prefix_tokens_gathered": self._gathered_tokens,
        }
