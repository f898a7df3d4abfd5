"""The reference of swap-in: the worked example to the letter, laws that do not know how it works, and a slow model."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_in_world import BAD_SLOTS, MAX_CONTEXT, Shape, Step, World, random_selection, random_start, shapes

from hisparse_kernel import reference
from hisparse_kernel.reference import HIT, MISS, TAIL

# ---- the worked example


def test_worked_example_to_the_letter() -> None:
    owners = [100, 200, 300, 400, 500, 600, 750, 800, 900, 1000, 1050, 1200, 1300, 1400, 1500, 1600]
    selected = [150, 200, 700, -1, 300, 800, 1100, 900]
    ids = [*owners, 700, 1100]
    position_of = {name: position for position, name in enumerate(ids)} | {150: 64, -1: -1}
    page_size, seq_len = 64, 65  # the newest token is at position 64, in the first tail row
    host_rows = torch.arange(200, dtype=torch.uint8).unsqueeze(1).expand(-1, 16).contiguous()
    hot_rows = torch.zeros((2 * (16 + page_size), 16), dtype=torch.uint8)
    state = {
        "owners": torch.full((2, 16), -1, dtype=torch.int32),
        "lru_order": torch.arange(16, dtype=torch.int16).repeat(2, 1),
        "tail_start": torch.tensor([0, 64], dtype=torch.int32),
        "counters": torch.zeros(3, dtype=torch.int64),
    }
    state["owners"][1] = torch.tensor([position_of[name] for name in owners], dtype=torch.int32)
    state["lru_order"][1] = torch.tensor([3, 1, 5, 0, 7, 2, 4, 6, *range(8, 16)], dtype=torch.int16)

    out = reference.swap_in(
        selected=torch.tensor([[position_of[name] for name in selected]], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        req_pool_indices=torch.tensor([1]),
        num_real_reqs=torch.tensor([1], dtype=torch.int32),
        req_to_token=(torch.arange(100, dtype=torch.int32) + 100).repeat(2, 1),
        host_rows=host_rows,
        hot_rows=hot_rows,
        page_size=page_size,
        out=torch.full((1, 8), 999, dtype=torch.int32),
        **state,
    )

    region_start = 16 + page_size
    assert [row - region_start if row >= 0 else row for row in out[0].tolist()] == [16, 1, 3, -1, 2, 7, 5, 8]
    assert state["lru_order"][1].tolist() == [0, 4, 6, 9, 10, 11, 12, 13, 14, 15, 3, 5, 1, 7, 2, 8]
    now = [*owners[:3], 700, *owners[4:5], 1100, *owners[6:]]
    assert state["owners"][1].tolist() == [position_of[name] for name in now]
    copied = {3: 700, 5: 1100}
    for row in range(16 + page_size):
        byte = 100 + position_of[copied[row]] if row in copied else 0
        assert hot_rows[region_start + row].tolist() == [byte] * 16
    assert state["counters"].tolist() == [1, 4, 2]


# ---- laws, over random histories


def play(
    shape: Shape,
    num_steps: int,
    check: Callable[[World, Step], None],
    tell: Callable[[World, int, list[int]], None] | None = None,
) -> None:
    """A random history; `check` sees every swap-in, `tell` every start of a request."""
    rng, world = random.Random(shape.seed), World(shape, reference)

    def start(region: int) -> None:
        prompt_len, candidates = random_start(rng, shape)
        world.start(region, prompt_len, candidates)
        if tell is not None:
            tell(world, region, candidates)

    requests = range(1, shape.regions)
    for region in requests:
        start(region)
    for _ in range(num_steps):
        event = rng.choice(("decode", "decode", "decode", "decode", "again", "start", "spoil"))
        regions = rng.sample(requests, rng.randint(0, len(requests)))
        padding = rng.randrange(3)
        if event == "start":
            start(rng.choice(requests))
        elif event == "spoil":
            region = rng.choice(requests)
            world.spoil(region, rng.randrange(max(1, world.seq_lens[region])), rng.choice(BAD_SLOTS))
        elif event == "decode":
            regions = [region for region in regions if can_grow(world, region)]
            world.grow(regions, padding)
        selected = [random_selection(rng, shape, world.seq_lens[region]) for region in regions]
        selected += [list(range(shape.top_k))] * padding
        check(world, world.swap_in(regions, selected, padding))


histories = given(shape=shapes(), num_steps=st.integers(1, 20))


def can_grow(world: World, region: int) -> bool:
    position = world.seq_lens[region]
    return position < MAX_CONTEXT and world.has_host_row(region, position)


def region_slice(shape: Shape, region: int) -> slice:
    return slice(region * shape.region_rows, (region + 1) * shape.region_rows)


def check_rows(world: World, step: Step) -> None:
    """I3: what each entry must be, from its position alone."""
    shape, before = world.shape, step.before
    out = step.out.tolist()
    assert all(row == [-1] * shape.top_k for row in out[len(step.regions) :]), "padding got rows"
    for region, seq_len, positions, rows in zip(step.regions, step.seq_lens, step.selected, out, strict=False):
        first = region * shape.region_rows
        resident = before["owners"][0, region].tolist()
        row_of: dict[int, int] = {}
        for position, row in zip(positions, rows, strict=True):
            if not 0 <= position < seq_len:
                assert row == -1, f"position {position} of {seq_len} got row {row}"
                continue
            if row == -1:
                assert not world.in_tail(region, position), f"tail position {position} got no row"
                assert position not in resident, f"resident position {position} got no row"
                assert not world.has_host_row(region, position), f"position {position} has a host row and got none"
                continue
            assert first <= row < first + shape.region_rows, f"row {row} is not of region {region}"
            assert torch.equal(world.hot_rows[row], world.rows[region, position]), f"row {row} is not of {position}"
            assert row_of.setdefault(position, row) == row, f"position {position} has two rows"
            if world.in_tail(region, position):
                assert row - first == shape.device_buffer_size + position % shape.page_size
            else:
                assert row - first < shape.device_buffer_size
                assert position in resident or world.has_host_row(region, position)
                assert int(world.owners[0, region, row - first]) == position, "a row of this step was a victim (I5)"
        assert len(set(row_of.values())) == len(row_of), f"two positions share a row: {row_of}"


def check_state(world: World, step: Step) -> None:
    """I4, and nothing changes that has no reason to."""
    shape, before = world.shape, step.before
    for region in range(shape.regions):
        assert sorted(world.lru_order[0, region].tolist()) == list(range(shape.device_buffer_size))
        held = [position for position in world.owners[0, region].tolist() if position != -1]
        assert len(set(held)) == len(held) and all(position >= 0 for position in held)
        for row, position in enumerate(world.owners[0, region].tolist()):
            if position >= 0:
                hot_row = world.hot_rows[region * shape.region_rows + row]
                assert torch.equal(hot_row, world.rows[region, position]), "an owned row holds something else (I2)"
        rows = region_slice(shape, region)
        if region not in step.regions:
            assert torch.equal(world.hot_rows[rows], before["hot_rows"][rows])
            assert torch.equal(world.owners[0, region], before["owners"][0, region])
            assert torch.equal(world.lru_order[0, region], before["lru_order"][0, region])
        tail = slice(rows.start + shape.device_buffer_size, rows.stop)
        assert torch.equal(world.hot_rows[tail], before["hot_rows"][tail]), "swap-in wrote to the tail ring"
    for name in ("host_rows", "tail_start", "req_to_token"):
        assert torch.equal(getattr(world, name), before[name]), f"swap-in changed {name}"
    assert world.guards_are_intact()


def check_counters(world: World, step: Step) -> None:
    """Every entry with a row is counted once, and a miss is a row whose bytes and owner changed."""
    with_row, in_tail = 0, 0
    for region, positions, rows in zip(step.regions, step.selected, step.out.tolist(), strict=False):
        for position, row in zip(positions, rows, strict=True):
            with_row += row >= 0
            in_tail += row >= 0 and world.in_tail(region, position)
    changed = (world.hot_rows != step.before["hot_rows"]).any(-1)
    assert sum(step.counted) == with_row
    assert step.counted[TAIL] == in_tail
    assert step.counted[MISS] == int(changed.sum())
    assert step.counted[MISS] == int((world.owners != step.before["owners"]).sum())


def check_recency(world: World, step: Step) -> None:
    """The order afterwards: untouched rows (old order), rows just loaded (input order), hits (old order)."""
    shape = world.shape
    for region, rows in zip(step.regions, step.out.tolist(), strict=False):
        first = region * shape.region_rows
        old_owner = step.before["owners"][0, region].tolist()
        new_owner = world.owners[0, region].tolist()
        returned = list(dict.fromkeys(r - first for r in rows if 0 <= r - first < shape.device_buffer_size))
        loaded = [row for row in returned if old_owner[row] != new_owner[row]]
        hits = [row for row in returned if old_owner[row] == new_owner[row]]
        old = step.before["lru_order"][0, region].tolist()
        untouched = [row for row in old if row not in returned]
        assert world.lru_order[0, region].tolist() == untouched + loaded + [row for row in old if row in hits]


@histories
@settings(max_examples=150)
def test_laws_hold_in_every_step_of_random_histories(shape: Shape, num_steps: int) -> None:
    def check(world: World, step: Step) -> None:
        check_rows(world, step)
        check_state(world, step)
        check_counters(world, step)
        check_recency(world, step)

    play(shape, num_steps, check)


@histories
@settings(max_examples=40)
def test_a_second_identical_call_changes_nothing(shape: Shape, num_steps: int) -> None:
    def check(world: World, step: Step) -> None:
        again = world.swap_in(step.regions, step.selected, step.padding)
        assert torch.equal(again.out, step.out)
        assert again.counted == [step.counted[TAIL], step.counted[HIT] + step.counted[MISS], 0]
        assert torch.equal(world.hot_rows, again.before["hot_rows"])
        assert torch.equal(world.owners, again.before["owners"])

    play(shape, num_steps, check)


# ---- a slow model: each region an ordered dictionary, least recently used row first


class LruModel:
    """DESIGN's six steps in plain Python, one request at a time."""

    def __init__(self) -> None:
        self.regions: dict[int, OrderedDict[int, int]] = {}  # region -> row -> position (-1 = empty)

    def start(self, world: World, region: int, candidates: list[int]) -> None:
        """Seeded rows are numbered from the most wanted position on, and that one is the most recently used."""
        wanted = [p for p in dict.fromkeys(candidates) if p >= 0][: world.shape.device_buffer_size]
        rows = OrderedDict((row, -1) for row in range(len(wanted), world.shape.device_buffer_size))
        for row in reversed(range(len(wanted))):
            rows[row] = wanted[row]
        self.regions[region] = rows

    def step(self, world: World, region: int, positions: list[int]) -> list[int]:
        """Rows within the region, -1 = none."""
        lru, shape, seq_len = self.regions[region], world.shape, world.seq_lens[region]
        paged = [p for p in positions if 0 <= p < seq_len and not world.in_tail(region, p)]
        row_of = {position: row for row, position in lru.items() if position in paged}
        hits = [row for row, position in lru.items() if position in paged]
        evictable = [row for row in lru if row not in hits]
        missing = [p for p in dict.fromkeys(paged) if p not in row_of]
        loaded = []
        for position, victim in zip(missing, evictable, strict=False):
            if world.has_host_row(region, position):
                lru[victim] = position
                row_of[position] = victim
                loaded.append(victim)
        for row in loaded + hits:
            lru.move_to_end(row)
        rows = []
        for position in positions:
            if 0 <= position < seq_len and world.in_tail(region, position):
                rows.append(shape.device_buffer_size + position % shape.page_size)
            else:
                rows.append(row_of.get(position, -1))
        return rows


@histories
@settings(max_examples=120)
def test_equals_the_slow_model_step_by_step(shape: Shape, num_steps: int) -> None:
    model = LruModel()

    def check(world: World, step: Step) -> None:
        for region, positions, rows in zip(step.regions, step.selected, step.out.tolist(), strict=False):
            first = region * world.shape.region_rows
            expected = model.step(world, region, positions)
            assert rows == [first + row if row >= 0 else -1 for row in expected]
            lru = model.regions[region]
            assert world.lru_order[0, region].tolist() == list(lru)
            assert world.owners[0, region].tolist() == [lru[row] for row in range(len(lru))]

    play(shape, num_steps, check, model.start)


# ---- corner cases, written out


def small_world(
    *, prompt_len: int, top_k: int = 4, device_buffer_size: int = 4, candidates: tuple[int, ...] = ()
) -> World:
    world = World(Shape(top_k, device_buffer_size, 2, 3, torch.int32, seed=7), reference)
    world.start(1, prompt_len, list(candidates))
    return world


def test_a_position_without_host_row_gets_none_and_its_victim_keeps_owner_and_place() -> None:
    world = small_world(prompt_len=12, candidates=(3, 2, 1, 0))  # rows 0..3 hold 3, 2, 1, 0; row 3 is the oldest
    world.spoil(1, 8, -1)
    step = world.swap_in([1], [[7, 8, 9, 8]], 0)
    first = world.shape.region_rows
    assert step.out.tolist() == [[first + 3, -1, first + 1, -1]]  # 7 takes row 3; 8 would take row 2; 9 takes row 1
    assert world.owners[0, 1].tolist() == [3, 9, 1, 7]
    assert world.lru_order[0, 1].tolist() == [2, 0, 3, 1]
    assert step.counted == [0, 0, 2]


@pytest.mark.parametrize("slot", BAD_SLOTS)
def test_a_resident_position_needs_no_host_row(slot: int) -> None:
    world = small_world(prompt_len=8, candidates=(5,))
    world.spoil(1, 5, slot)
    step = world.swap_in([1], [[5, 5, -1, 8]], 0)
    assert step.out.tolist() == [[world.shape.region_rows] * 2 + [-1, -1]]
    assert step.counted == [0, 2, 0]


def test_the_whole_buffer_can_be_replaced_at_once() -> None:
    world = small_world(prompt_len=8, candidates=(0, 1, 2, 3))
    step = world.swap_in([1], [[4, 5, 6, 7]], 0)
    assert step.counted == [0, 0, 4]
    check_rows(world, step)
    assert world.owners[0, 1].tolist() == [7, 6, 5, 4]


def test_no_real_request_touches_nothing() -> None:
    world = small_world(prompt_len=8, candidates=(0, 1))
    before = world.snapshot()
    step = world.swap_in([], [[0, 1, 2, 3]] * 3, 3)
    assert step.out.tolist() == [[-1] * 4] * 3
    for name, tensor in before.items():
        assert torch.equal(getattr(world, name), tensor), name


def test_a_generated_row_moves_from_the_tail_ring_to_the_host_and_back() -> None:
    """Position 2 leaves the ring of two rows when position 4 is written; from then on it is a miss, then a hit."""
    world = small_world(prompt_len=2)
    for position in (2, 3, 4):
        world.grow([1], 0)
        step = world.swap_in([1], [[2, position, -1, -1]], 0)
        check_rows(world, step)
    assert step.counted == [1, 0, 1]
    assert world.swap_in([1], [[2, 4, -1, -1]], 0).counted == [1, 1, 0]


def test_a_prompt_row_is_never_read_from_the_tail_ring() -> None:
    """The newest positions of a prompt were not written there: tail_start keeps the stale ring out of it."""
    world = small_world(prompt_len=8)
    step = world.swap_in([1], [[6, 7, -1, -1]], 0)
    check_rows(world, step)
    assert step.counted == [0, 0, 2]
