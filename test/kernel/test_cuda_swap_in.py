"""swap_in on CUDA against the reference, bit for bit: outputs, rows, residency state and counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_world import DEVICE, Guarded, Shape, World, with_padding

from hisparse_kernel import cuda_ops
from hisparse_kernel.cuda_ops import LaunchShape

pytestmark = pytest.mark.gpu

I32, I64 = torch.int32, torch.int64

SMALL = {
    "odd": Shape(3, 100, 37, page_size=1, row_bytes=48, lens_dtype=I32, ids_dtype=I64),
    "tiny": Shape(2, 1, 1, page_size=1, row_bytes=16, max_context=4),
    "selection fills buffer": Shape(4, 33, 33, page_size=7, row_bytes=656, lens_dtype=I64, ids_dtype=I32),
    "warp": Shape(1, 64, 32, row_bytes=1152, lens_dtype=I32, ids_dtype=I32),
    "bad slots": Shape(5, 200, 150, row_bytes=656, bad_slots=0.1),
    "only bad slots": Shape(5, 200, 150, row_bytes=16, bad_slots=1.0),
    "strided host rows": Shape(3, 300, 129, row_bytes=656, host_stride_bytes=704),
}
LARGE = {
    "clusters of 8": Shape(2, 4096, 2048, row_bytes=656, max_context=20_000),
    "clusters of 8, bf16": Shape(8, 6144, 2048, row_bytes=1152, max_context=20_000, lens_dtype=I32),
    "clusters of 2": Shape(20, 4096, 2048, row_bytes=656, max_context=9_000, bad_slots=0.01),
    "two launches": Shape(40, 4096, 2000, row_bytes=16, max_context=9_000),
    "two launches, odd sizes": Shape(70, 4095, 2047, row_bytes=32, max_context=9_000),
    "two CTAs an SM": Shape(140, 8192, 2048, row_bytes=16, max_context=9_000, bad_slots=0.001),
    "two CTAs an SM, bf16": Shape(140, 4096, 2048, row_bytes=1152, max_context=9_000),
    "wide": Shape(2, 20_000, 2048, row_bytes=656, max_context=60_000),
    "wide, largest": Shape(1, 32_767, 1, row_bytes=16, max_context=40_000),
    "any": Shape(3, 5000, 3001, row_bytes=48, max_context=20_000, bad_slots=0.01),
    "any, largest": Shape(2, 32_767, 32_767, row_bytes=16, max_context=70_000),
}


def run_steps(shape: Shape, steps: int) -> None:
    world = World(shape)
    for i in range(steps):
        if i % 5 == 4:
            world.move_on()
        world.step(world.draw(hits=(0.0, 0.6, 0.95, 1.0)[i % 4], repeats=(0.0, 0.0, 0.5)[i % 3]))
    assert world.theirs["counters"].sum() > 0


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_small_shapes_equal_the_reference(name: str, padded: bool) -> None:
    run_steps(with_padding(SMALL[name]) if padded else SMALL[name], 300)


@pytest.mark.parametrize("name", LARGE)
def test_large_shapes_equal_the_reference(name: str) -> None:
    run_steps(LARGE[name], 60)


LAUNCH_SHAPES = [LaunchShape(1024, ctas, 0) for ctas in (1, 2, 4, 8, 16)]
LAUNCH_SHAPES += [LaunchShape(1024, 1, 1), LaunchShape(1024, 2, 3), LaunchShape(512, 1, 16), LaunchShape(512, 4, 0)]


@pytest.mark.parametrize("context", [9_000, 200_000, 300_000])
@pytest.mark.parametrize("launch_shape", LAUNCH_SHAPES)
@pytest.mark.parametrize("buffer", [4096, 6144, 5000])
def test_every_launch_shape_equals_the_reference(
    launch_shape: LaunchShape, context: int, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ops, "launch_shape", lambda batch: launch_shape)
    run_steps(Shape(3, buffer, 2048, row_bytes=656, max_context=context, bad_slots=0.005, num_real=2), 12)


def test_worked_example() -> None:
    """The example of docs/architecture.md; ids renamed to positions, 40 (the newest) for 150."""
    held = [100, 200, 300, 400, 500, 600, 750, 800, 900, 1000, 1050, 1200, 1300, 1400, 1500, 1600]
    position = {name: i for i, name in enumerate([*held, 700, 1100])} | {150: 40, -1: -1}
    world = World(Shape(1, 16, 8, page_size=1, row_bytes=16, max_context=41, num_slots=60))
    region = int(world.req_pool_indices[0])
    world.tail_start.fill_(40)
    order = [3, 1, 5, 0, 7, 2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15]
    world.mine["owners"].tensor[region] = torch.tensor([position[name] for name in held], device=DEVICE)
    world.mine["lru_order"].tensor[region] = torch.tensor(order, device=DEVICE)
    selected = [position[name] for name in (150, 200, 700, -1, 300, 800, 1100, 900)]
    out = world.run_mine(torch.tensor([selected], dtype=I32, device=DEVICE))
    first = region * 17
    assert [row - first if row >= 0 else -1 for row in out[0].tolist()] == [16, 1, 3, -1, 2, 7, 5, 8]
    new_order = [0, 4, 6, 9, 10, 11, 12, 13, 14, 15, 3, 5, 1, 7, 2, 8]
    assert world.mine["lru_order"].tensor[region].tolist() == new_order
    assert world.mine["owners"].tensor[region, [3, 5]].tolist() == [position[700], position[1100]]
    assert world.mine["counters"].tensor.tolist() == [1, 4, 2]


HOSTILE = {
    "all none": lambda world, size: torch.full(size, -1),
    "smallest int": lambda world, size: torch.full(size, -(2**31)),
    "largest int": lambda world, size: torch.full(size, 2**31 - 1),
    "one position": lambda world, size: torch.full(size, 5),
    "two positions in turn": lambda world, size: (torch.arange(size[1]) % 2 + 9).expand(size),
    "newest only": lambda world, size: torch.full(size, world.shape.max_context - 1),
    "just out of range": lambda world, size: torch.full(size, world.shape.max_context),
    "descending": lambda world, size: (size[1] - torch.arange(size[1])).expand(size),
    "one hash chain": lambda world, size: torch.tensor(colliding_positions(size[1])).expand(size),
}


def colliding_positions(count: int, cells_log2: int = 13) -> list[int]:
    """Positions below 2**20 with the same home cell in the table of 2**13 cells, repeated if there are too few."""
    found = [p for p in range(1 << 20) if (p * 2654435769 & 0xFFFFFFFF) >> (32 - cells_log2) == 77]
    return (found * (count // len(found) + 1))[:count]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_selections(name: str) -> None:
    world = World(Shape(3, 300, 200, row_bytes=48, max_context=1 << 20))
    selected = HOSTILE[name](world, (3, 200)).to(I32).to(DEVICE).contiguous()
    for _ in range(3):
        world.step(selected)
    world.step(world.draw())


@pytest.mark.parametrize("lens", [0, 1, 2])
def test_short_requests(lens: int) -> None:
    world = World(Shape(3, 64, 64, row_bytes=48, page_size=4, max_context=100))
    for tail_start in (0, 1, 50):
        world.tail_start.fill_(tail_start)
        world.seq_lens.fill_(100)
        world.step(world.draw())
        world.seq_lens.fill_(max(lens, 1))
        world.step(torch.arange(-1, 63, dtype=I32, device=DEVICE).expand(3, 64).contiguous())


def test_no_real_request_touches_nothing() -> None:
    world = World(replace(SMALL["odd"], num_real=0))
    world.step(world.draw())
    assert (world.out.tensor == -1).all()


def test_regions_that_do_not_exist_are_refused() -> None:
    world = World(SMALL["odd"])
    selected = world.draw(hits=0.0)
    for bad in (-1, world.shape.regions, 2**31 - 1):
        world.req_pool_indices.fill_(bad)
        out = world.run_mine(selected)
        assert (out == -1).all()
    world.expected.fill_(-1)
    world.check()


def test_rows_are_the_host_rows() -> None:
    """Independent of the reference: each output row holds the bytes of its position, and the order is a permutation."""
    shape = Shape(4, 512, 256, row_bytes=656, max_context=4000)
    world = World(shape)
    world.tail_start.fill_(shape.max_context)
    host = world.host.cuda()
    for _ in range(200):
        selected = world.draw(hits=0.8, repeats=0.1)
        out = world.run_mine(selected).long()
        valid = (selected >= 0) & (selected < shape.max_context)
        assert torch.equal(out >= 0, valid)
        slot = world.req_to_token[world.req_pool_indices].gather(1, selected.long().clamp(0, shape.max_context - 1))
        assert torch.equal(world.mine["hot_rows"].tensor[out[valid]], host[slot[valid].long()])
        order = world.mine["lru_order"].tensor[world.req_pool_indices].long().sort(1).values
        assert torch.equal(order, torch.arange(512, device=DEVICE).expand(4, -1))
        region_start = world.req_pool_indices.unsqueeze(1) * (512 + shape.page_size)
        inside = (out >= region_start) & (out < region_start + 512)
        assert inside[valid].all()


def test_two_streams_do_not_disturb_each_other() -> None:
    worlds = [World(Shape(4, 4096, 2048, row_bytes=656, max_context=9_000), seed=i) for i in range(2)]
    selections = [[world.draw(hits=0.0) for _ in range(50)] for world in worlds]
    streams = [torch.cuda.Stream() for _ in worlds]
    torch.cuda.synchronize()
    for i in range(50):
        for world, stream, selected in zip(worlds, streams, selections, strict=True):
            with torch.cuda.stream(stream):
                world.run_mine(selected[i])
    torch.cuda.synchronize()
    for world, selected in zip(worlds, selections, strict=True):
        for step in selected:
            world.run_reference(step)
        world.check()


@pytest.mark.parametrize("batch", [3, 40])
def test_graph_replay_equals_eager_over_10_000_steps(batch: int) -> None:
    """The same selections through one captured graph and through plain calls, far past the first evictions; the
    number of real requests and the lengths change between replays."""
    shape = Shape(batch, 512, 256, row_bytes=48, max_context=6000, num_slots=2000)
    eager, replayed = World(shape, seed=1), World(shape, seed=1)
    bank = [eager.draw(hits=0.0, repeats=repeats) for repeats in (0.0, 0.0, 0.0, 0.3) for _ in range(25)]
    selected = bank[0].clone()
    cuda_ops.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.run_mine(selected)
    for name, guarded in replayed.mine.items():
        guarded.tensor.copy_(eager.mine[name].tensor)
    different = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for i in range(10_000):
        if i % 100 == 0:
            for world in (eager, replayed):
                world.num_real_reqs.fill_(i // 100 % (batch + 1))
                world.seq_lens.fill_(6000 - i // 10 % 900)
        selected.copy_(bank[(i * 7) % len(bank)])
        graph.replay()
        eager.run_mine(selected)
        different |= (eager.out.tensor != replayed.out.tensor).any()
    assert not different
    for name in World.STATE:
        assert torch.equal(eager.mine[name].tensor, replayed.mine[name].tensor), name
    assert eager.mine["counters"].tensor[2] > 10_000


def test_public_function_runs_the_kernel_for_cuda_tensors() -> None:
    import hisparse_kernel

    world = World(SMALL["odd"])
    selected = world.draw()
    state = {name: guarded.tensor for name, guarded in world.mine.items()}
    out = hisparse_kernel.swap_in(**world.arguments(selected), **state, out=world.out.tensor)
    assert out is world.out.tensor
    world.run_reference(selected)
    world.check()


def test_guards_notice_a_write_outside() -> None:
    """The guards themselves: a write one byte before or behind the tensor is seen."""
    for offset in (-1, 16):
        guarded = Guarded(torch.zeros(16, dtype=torch.uint8, device=DEVICE))
        whole = guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() + offset)
        assert bool(guarded.intact())
        whole.fill_(0)
        assert not bool(guarded.intact())
