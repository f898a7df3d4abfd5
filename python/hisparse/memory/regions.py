"""The hot buffer: all rows on the device, one region a request."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HotBuffer:
    """Device rows of every layer and the residency state over them. Only `HiSparseCoordinator` writes to it.

    Region r belongs to the request with `req_pool_idx` r (region 0 to SGLang's batch padding, which never uses it):
    `device_buffer_size` LRU rows, then `page_size` tail rows. A decode token at position p >= tail_start[r] lies in
    tail row `p % page_size` while p is one of the newest `page_size` positions: [seq_len - page_size, seq_len).

    Invariants (`check`): a position is in at most one LRU row of a region (I4), and `lru_order` is a permutation.

    Attributes:
        rows: uint8 [layers, regions * region_rows, row_bytes].
        owners: int32 [layers, regions, device_buffer_size]; the position each LRU row holds, -1 = empty.
        lru_order: int16 [layers, regions, device_buffer_size]; LRU rows from least to most recently used.
        tail_start: int32 [regions]; the request's first position that was generated in decode.
    """

    device_buffer_size: int
    page_size: int
    rows: torch.Tensor
    owners: torch.Tensor
    lru_order: torch.Tensor
    tail_start: torch.Tensor

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        regions: int,
        device_buffer_size: int,
        page_size: int,
        row_bytes: int,
        device: str | torch.device,
    ) -> HotBuffer:
        """All regions empty. Raises torch's out-of-memory error if the device cannot hold `bytes_for(...)`."""
        shape = (layers, regions, device_buffer_size)
        order = torch.arange(device_buffer_size, dtype=torch.int16, device=device)
        region_rows = device_buffer_size + page_size
        return cls(
            device_buffer_size=device_buffer_size,
            page_size=page_size,
            rows=torch.zeros((layers, regions * region_rows, row_bytes), dtype=torch.uint8, device=device),
            owners=torch.full(shape, -1, dtype=torch.int32, device=device),
            lru_order=order.expand(shape).contiguous(),
            tail_start=torch.zeros(regions, dtype=torch.int32, device=device),
        )

    @property
    def regions(self) -> int:
        return self.tail_start.shape[0]

    def region_rows(self, region: int) -> slice:
        """The hot rows of one region, as a slice of `rows[layer]`."""
        size = self.device_buffer_size + self.page_size
        return slice(region * size, (region + 1) * size)

    def check(self) -> None:
        """Raise AssertionError unless I4 holds in every region of every layer."""
        order = self.lru_order.long().sort(-1).values
        wrong = (order != torch.arange(self.device_buffer_size, device=order.device)).any(-1).nonzero()
        assert not len(wrong), f"lru_order is no permutation in (layer, region) {wrong[0].tolist()}"
        held = self.owners.sort(-1).values
        twice = ((held[..., 1:] == held[..., :-1]) & (held[..., 1:] >= 0)).any(-1).nonzero()
        assert not len(twice), f"a position is in two LRU rows in (layer, region) {twice[0].tolist()}"
        assert int(self.owners.min()) >= -1, f"owner {int(self.owners.min())} is no position"
