"""What runs beside the main stream: prefixes gathered ahead, and swap-in begun before it is asked for."""

from __future__ import annotations

import pytest
import torch

from hisparse.config import ResolvedConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.extend_plan import plan_extend
from hisparse.memory import HostPool, HotBuffer
from hisparse.row_format import Bf16Row
from hisparse.workspace import Workspace

pytestmark = pytest.mark.gpu

LAYERS, ROW, PAGE, TOP_K, BUFFER, CONTEXT, REGIONS = 5, 1152, 64, 64, 128, 1024, 6
SLOW_CYCLES = 3_000_000


def filled_pool() -> HostPool:
    pool = HostPool(layers=LAYERS, slots=REGIONS * CONTEXT, row_bytes=ROW, pin=True)
    pool.rows.copy_(torch.randint(0, 256, pool.rows.shape, dtype=torch.uint8))
    return pool


@pytest.mark.parametrize("buffers", (1, 2))
def test_prefixes_gathered_ahead_are_the_host_rows(buffers: int) -> None:
    """Two groups a layer; a slow reader of each buffer must not see the next prefix arrive under it."""
    pool = filled_pool()
    table = torch.randperm(REGIONS * CONTEXT).view(REGIONS, CONTEXT).int().cuda()
    groups = plan_extend(
        prefix_lens=[300, 200, 450],
        extend_lens=[20, 10, 30],
        req_pool_indices=torch.tensor([1, 2, 4], device="cuda"),
        out_cache_loc=torch.arange(60, device="cuda"),
        req_to_token=table,
        capacity=640,
        seed_queries=1,
    )
    assert len(groups) == 2
    workspace = Workspace(torch.zeros((buffers, 640, ROW), dtype=torch.uint8, device="cuda"), pool, poison=0xFF)
    for _ in range(3):
        workspace.begin(groups)
        seen = []
        for layer in range(LAYERS):
            for group in groups:
                rows = workspace.prefix(layer, group)
                torch.cuda._sleep(SLOW_CYCLES)
                seen.append((layer, group, rows[group.prefix_rows].clone()))
        torch.cuda.synchronize()
        for layer, group, rows in seen:
            assert torch.equal(rows.cpu(), pool.rows[layer][group.prefix_slots.cpu()]), f"layer {layer}"


@pytest.mark.parametrize("graph", (False, True))
def test_rows_are_there_once_they_are_joined(graph: bool) -> None:
    """Swap-in begun before it is asked for, and the new token's row stored beside it."""
    pool, batch = filled_pool(), 4
    table = torch.randperm(REGIONS * CONTEXT).view(REGIONS, CONTEXT).int().cuda()
    hot = HotBuffer.allocate(
        layers=LAYERS, regions=REGIONS, device_buffer_size=BUFFER, page_size=PAGE, row_bytes=ROW, device="cuda"
    )
    coordinator = HiSparseCoordinator(
        config=ResolvedConfig(TOP_K, BUFFER, PAGE, 640, None, None, workspaces=2),
        row_format=Bf16Row(),
        host_pool=pool,
        hot_buffer=hot,
        workspace=torch.zeros((2, 640, ROW), dtype=torch.uint8, device="cuda"),
        req_to_token=table,
        start_layer=0,
        max_batch=batch,
    )
    coordinator.num_real_reqs.fill_(batch - 1)
    regions = torch.tensor([3, 1, 5, 0], device="cuda")
    # Far enough on that no selected position lies in the tail ring, which holds one row each here.
    seq_lens = torch.tensor([900, 801, 1000, 1], device="cuda")
    hot.tail_start[regions[:3]] = 1000
    selected = torch.zeros((LAYERS, batch, TOP_K), dtype=torch.int32, device="cuda")
    found = torch.zeros((LAYERS, batch - 1, TOP_K, ROW), dtype=torch.uint8, device="cuda")
    new_slots = table[regions, seq_lens - 1].long()
    new_rows = regions * (BUFFER + PAGE) + BUFFER + (seq_lens - 1) % PAGE
    k_nope = torch.zeros((LAYERS, batch, 1, 512), dtype=torch.bfloat16, device="cuda")
    k_rope = torch.zeros((LAYERS, batch, 1, 64), dtype=torch.bfloat16, device="cuda")
    stored = torch.zeros((LAYERS, batch, ROW), dtype=torch.uint8, device="cuda")

    def step() -> None:
        for layer in range(LAYERS):
            with coordinator._swap_in_beside.fork():  # swap-in comes late, so that a missing join shows
                torch.cuda._sleep(SLOW_CYCLES // 10)
            coordinator.start_swap_in(regions, seq_lens, selected[layer], layer)
            with coordinator._backup_beside.fork():
                torch.cuda._sleep(SLOW_CYCLES // 10)
            coordinator.store_decode(
                layer,
                k_nope=k_nope[layer],
                k_rope=k_rope[layer],
                slots=new_slots,
                req_pool_indices=regions,
                seq_lens=seq_lens,
            )
            row_ids = coordinator.swap_in_selected_pages(regions, seq_lens, selected[layer], layer)
            coordinator.join_decode()
            stored[layer] = hot.rows[layer][new_rows]
            found[layer] = hot.rows[layer][row_ids[: batch - 1].long().clamp(min=0)]

    for row in range(LAYERS * batch):
        selected.view(-1, TOP_K)[row] = torch.randperm(700)[:TOP_K]
    step()
    run = step
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        run = captured.replay
    for _ in range(20):
        for row in range(LAYERS * batch):
            selected.view(-1, TOP_K)[row] = torch.randperm(700)[:TOP_K]
        k_nope.normal_()
        k_rope.normal_()
        run()
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            new = Bf16Row().pack(k_nope[layer, :, 0], k_rope[layer, :, 0])[: batch - 1]
            assert torch.equal(stored[layer, : batch - 1], new), "tail rows"
            assert torch.equal(pool.rows[layer][new_slots.cpu()][: batch - 1], new.cpu()), "host rows"
            for b in range(batch - 1):
                slots = table[regions[b]][selected[layer, b].long()].long().cpu()
                assert torch.equal(found[layer, b].cpu(), pool.rows[layer][slots])
    hot.check()
    steps = coordinator.statistics()["selected_positions"] / (LAYERS * (batch - 1) * TOP_K)
    assert steps == int(steps) >= 21, "each layer is swapped in once a step"
