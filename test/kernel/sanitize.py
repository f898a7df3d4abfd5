"""A short run of every kernel, for compute-sanitizer (`make test-gpu-sanitize`):

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        --kernel-name kernel_substring=hisparse python test/kernel/sanitize.py

and the same with `--tool racecheck`. Without torch's memory cache every tensor is an allocation of its own, so that
memcheck sees each access outside it.
"""

from __future__ import annotations

import torch
from cuda_world import Shape, World

from hisparse.row_format import Bf16Row, Fp8DsMlaRow
from hisparse_kernel import cuda_ops

SHAPES = {
    "exact": Shape(2, 4096, 2048, row_bytes=656, max_context=9_000, num_slots=2000, bad_slots=0.01, num_real=1),
    "exact, large": Shape(2, 6144, 2048, row_bytes=48, max_context=200_000, num_slots=2000),
    "compact": Shape(2, 100, 37, page_size=1, row_bytes=48, num_slots=300),
    "wide": Shape(1, 9000, 500, row_bytes=16, max_context=20_000, num_slots=300),
    "any": Shape(2, 2500, 2049, row_bytes=16, max_context=4000, num_slots=300, bad_slots=0.01),
}


def run_swap_in() -> None:
    for name, shape in SHAPES.items():
        for launch_shape in (cuda_ops.LaunchShape(1024, 2, 0), cuda_ops.LaunchShape(512, 1, 1)):
            cuda_ops.launch_shape = lambda batch, chosen=launch_shape: chosen
            world = World(shape)
            for repeats in (0.0, 0.3):
                world.run_mine(world.draw(repeats=repeats))
        print("swap_in", name, flush=True)


def run_the_others() -> None:
    for row_format in (Bf16Row(), Bf16Row(nope_dim=21, rope_dim=3), Fp8DsMlaRow()):
        host = torch.zeros(50, row_format.row_bytes, dtype=torch.uint8).pin_memory()
        hot = torch.zeros(3 * 40, row_format.row_bytes, dtype=torch.uint8, device="cuda")
        owners = torch.zeros(1, 3, 36, dtype=torch.int32, device="cuda")
        lru_order, tail_start = owners.short(), torch.zeros(3, dtype=torch.int32, device="cuda")
        ids = torch.arange(2, device="cuda") + 1
        parts = {
            "k_nope": torch.randn(2, row_format.nope_dim, device="cuda").bfloat16(),
            "k_rope": torch.randn(2, row_format.rope_dim, device="cuda").bfloat16(),
            "slots": ids,
            "host_rows": host,
            "row_format": row_format,
        }
        cuda_ops.reset(owners=owners, lru_order=lru_order, tail_start=tail_start, regions=ids, seq_lens=ids)
        cuda_ops.store_extend(**parts, row_ids=ids, workspace=hot)
        cuda_ops.store_decode(
            **parts,
            seq_lens=ids,
            req_pool_indices=ids,
            num_real_reqs=torch.ones(1, dtype=torch.int32, device="cuda"),
            hot_rows=hot,
            device_buffer_size=36,
            page_size=4,
        )
        cuda_ops.gather(host_rows=host, slots=ids, workspace=hot, row_ids=ids)
        cuda_ops.seed(
            candidates=torch.randint(-1, 30, (2, 70), device="cuda").int(),
            regions=ids,
            workspace_starts=ids,
            workspace=hot.clone(),
            hot_rows=hot,
            owners=owners[0],
            lru_order=lru_order[0],
            page_size=4,
        )
        print("store, gather, seed, reset", row_format.name, flush=True)


if __name__ == "__main__":
    run_swap_in()
    run_the_others()
    torch.cuda.synchronize()
