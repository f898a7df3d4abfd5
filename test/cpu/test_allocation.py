"""The allocator's tensor arithmetic against an allocator that hands out slots one token at a time."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.cpu.allocation import alloc_decode, alloc_extend

PAGES = 24


class NaiveAllocator:
    """Takes the next free page whenever a request's next token begins one; all or nothing."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.free = list(range(1, PAGES + 1))
        self.slots: list[list[int]] = []

    def extend(self, requests: list[int], counts: list[int]) -> list[int] | None:
        free, out = list(self.free), []
        grown = {r: list(self.slots[r]) for r in requests}
        for r, count in zip(requests, counts, strict=True):
            for _ in range(count):
                mine = grown[r]
                if len(mine) % self.page_size:
                    mine.append(mine[-1] + 1)
                elif free:
                    mine.append(free.pop(0) * self.page_size)
                else:
                    return None
                out.append(mine[-1])
        self.free = free
        for r, mine in grown.items():
            self.slots[r] = mine
        return out


def stock(page_size: int) -> SimpleNamespace:
    """The attributes of SGLang's PagedTokenToKVPoolAllocator that the functions use."""
    pages = torch.arange(1, PAGES + 1, dtype=torch.int64)
    return SimpleNamespace(page_size=page_size, need_sort=False, free_pages=pages, release_pages=pages[:0])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(st.integers(0, 11), min_size=1, max_size=4)),
        st.tuples(st.just("decode"), st.integers(1, 4)),
        st.tuples(st.just("free"), st.integers(0, 3)),
    ),
    max_size=25,
)


@given(st.sampled_from([1, 4]), steps)
def test_same_slots_as_the_naive_allocator(page_size, program):
    naive, ours = NaiveAllocator(page_size), stock(page_size)
    naive.slots = [[], [], [], []]
    for action, value in program:
        if action == "free":
            pages = sorted({slot // page_size for slot in naive.slots[value]})
            naive.slots[value] = []
            naive.free = pages + naive.free  # SGLang puts freed pages in front
            ours.free_pages = torch.cat((torch.tensor(pages, dtype=torch.int64), ours.free_pages))
            continue
        if action == "extend":
            requests, counts = list(range(len(value))), value
        else:
            requests, counts = [r for r in range(value) if naive.slots[r]], []
            counts = [1] * len(requests)
        before = torch.tensor([len(naive.slots[r]) for r in requests], dtype=torch.int64)
        after = before + torch.tensor(counts, dtype=torch.int64)
        last = torch.tensor([naive.slots[r][-1] if naive.slots[r] else -1 for r in requests], dtype=torch.int64)
        free_before = ours.free_pages.tolist()
        expected = naive.extend(requests, counts)
        if action == "extend":
            got = alloc_extend(ours, before, before, after, after, last, sum(counts))
        else:
            got = alloc_decode(ours, after, after, last)
        if expected is None:
            assert got is None
            assert ours.free_pages.tolist() == free_before, "refused, but took pages"
        else:
            assert got is not None and got.dtype == torch.int64
            assert got.tolist() == expected
        assert ours.free_pages.tolist() == naive.free


def test_sorts_released_pages_in_only_when_it_must():
    calls = []
    ours = stock(4)
    ours.need_sort, ours.free_pages = True, torch.tensor([5])

    def merge_and_sort_free():
        calls.append(1)
        ours.free_pages = torch.tensor([2, 5])

    ours.merge_and_sort_free = merge_and_sort_free
    zero, one, last = torch.tensor([0]), torch.tensor([1]), torch.tensor([-1])
    assert alloc_extend(ours, zero, zero, one, one, last, 1).tolist() == [20]
    assert not calls
    assert alloc_extend(ours, zero, zero, one, one, last, 1).tolist() == [8]
    assert calls
