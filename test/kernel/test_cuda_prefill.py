"""gather, seed and reset on CUDA against the reference."""

from __future__ import annotations

import pytest
import torch

from hisparse_kernel import cuda_ops, reference

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
POISON = 0x5A


def random_rows(num_rows: int, row_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_rows, row_bytes), dtype=torch.uint8)


@pytest.mark.parametrize("row_bytes", [16, 656, 1152, 1168])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 1000, 20_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_equals_the_reference(row_bytes: int, num_rows: int, dtype: torch.dtype) -> None:
    host = random_rows(5000, row_bytes).pin_memory()
    slots = torch.randint(0, 5000, (num_rows,), device=DEVICE).to(dtype)
    row_ids = torch.randperm(num_rows + 50, device=DEVICE)[:num_rows].to(dtype)
    results = []
    for op in (cuda_ops.gather, reference.gather):
        workspace = torch.full((num_rows + 50, row_bytes), POISON, dtype=torch.uint8, device=DEVICE)
        op(host_rows=host, slots=slots, workspace=workspace, row_ids=row_ids)
        results.append(workspace)
    assert torch.equal(results[0], results[1])


def test_gather_on_a_side_stream_with_strided_host_rows() -> None:
    host = random_rows(5000, 704).pin_memory()[:, :656]
    slots, row_ids = torch.randperm(5000, device=DEVICE)[:3000], torch.arange(3000, device=DEVICE)
    workspace = torch.zeros(3000, 656, dtype=torch.uint8, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cuda_ops.gather(host_rows=host, slots=slots, workspace=workspace, row_ids=row_ids)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(workspace.cpu(), host[slots.cpu()])


def test_gather_leaves_out_rows_that_do_not_exist() -> None:
    host = random_rows(10, 656).pin_memory()
    workspace = torch.full((4, 656), POISON, dtype=torch.uint8, device=DEVICE)
    slots, row_ids = torch.tensor([-1, 10, 3, 4], device=DEVICE), torch.tensor([0, 1, -1, 3], device=DEVICE)
    cuda_ops.gather(host_rows=host, slots=slots, workspace=workspace, row_ids=row_ids)
    assert (workspace[:3] == POISON).all() and torch.equal(workspace[3].cpu(), host[4])


@pytest.mark.parametrize(
    ("num_candidates", "num_lru_rows", "span"),
    [(1, 1, 5), (50, 100, 40), (2048, 4096, 3000), (6000, 100, 3000), (9000, 6144, 3000), (32_767, 4096, 3000)],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_seed_equals_the_reference(num_candidates: int, num_lru_rows: int, span: int, dtype: torch.dtype) -> None:
    """`span` positions a request, so that most selections repeat many."""
    requests, regions, page, row_bytes = 3, 6, 4, 48
    for first in (0, -20, span - 3):
        candidates = torch.randint(min(first, span - 1), span, (requests, num_candidates), device=DEVICE).int()
        arguments = {
            "candidates": candidates,
            "regions": torch.tensor([4, 1, 5], device=DEVICE).to(dtype),
            "workspace_starts": torch.tensor([0, span, 2 * span], device=DEVICE).to(dtype),
            "workspace": random_rows(3 * span, row_bytes).cuda(),
            "page_size": page,
        }
        results = []
        for op in (cuda_ops.seed, reference.seed):
            state = fresh_state(1, regions, num_lru_rows)
            hot = torch.full((regions * (num_lru_rows + page), row_bytes), POISON, dtype=torch.uint8, device=DEVICE)
            op(**arguments, hot_rows=hot, owners=state["owners"][0], lru_order=state["lru_order"][0])
            results.append((hot, *state.values()))
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs)


def fresh_state(layers: int, regions: int, num_lru_rows: int) -> dict[str, torch.Tensor]:
    return {
        "owners": torch.full((layers, regions, num_lru_rows), -1, dtype=torch.int32, device=DEVICE),
        "lru_order": torch.arange(num_lru_rows, device=DEVICE).short().repeat(layers, regions, 1),
        "tail_start": torch.zeros(regions, dtype=torch.int32, device=DEVICE),
    }


@pytest.mark.parametrize("num_lru_rows", [1, 100, 6144, 32_767])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reset_equals_the_reference(num_lru_rows: int, dtype: torch.dtype) -> None:
    used = fresh_state(3, 5, num_lru_rows)
    used["owners"].random_(0, 1000)
    used["lru_order"] = used["lru_order"].flip(2).contiguous()
    for chosen in ([], [2], [4, 1, 3]):
        regions = torch.tensor(chosen, device=DEVICE, dtype=dtype)
        seq_lens = torch.randint(0, 100_000, regions.shape, device=DEVICE).to(dtype)
        results = []
        for op in (cuda_ops.reset, reference.reset):
            state = {name: tensor.clone() for name, tensor in used.items()}
            op(**state, regions=regions, seq_lens=seq_lens)
            results.append(state)
        assert all(torch.equal(results[0][name], results[1][name]) for name in used)
