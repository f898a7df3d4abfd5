"""ranks.py: cores of each rank, and what data-parallel attention needs of SGLang on the CPU."""

import pytest
import torch

from hisparse.cpu import ranks


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        ([0, 1], [[0], [1]]),
        ([2, 3, 5, 7, 8], [[2, 3, 5], [7, 8]]),
        (list(range(8)), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([4, 6], [[4], [6], [4], [6]]),
        ([3], [[3], [3]]),
    ],
    ids=str,
)
def test_every_rank_has_a_share(cores, shares):
    assert [ranks.share_of_cores(cores, rank, len(shares)) for rank in range(len(shares))] == shares


def test_binding_is_the_users_if_set_and_else_a_share(monkeypatch):
    threads = []
    monkeypatch.setattr(ranks.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(ranks.torch, "set_num_threads", threads.append)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def sglang(**given):
        return f"SGLang's for {given}"

    assert ranks.init_threads_binding(sglang, tp_rank=1, tp_size=2) == "2,3"
    assert threads == [2]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert ranks.init_threads_binding(sglang, tp_rank=0, tp_size=2) == "0,1"
    assert threads == [2], "the user's number of threads stands"
    assert ranks.init_threads_binding(sglang, tp_rank=0, tp_size=1).startswith("SGLang's")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    assert ranks.init_threads_binding(sglang, tp_rank=0, tp_size=2).startswith("SGLang's")


def test_nothing_is_pinned_and_torch_is_left_as_it_was():
    before, made = torch.tensor, []
    ranks.prepare_mlp_sync_batch(lambda batch, runner: made.append(torch.tensor(batch, pin_memory=True)), [3, 4], None)
    assert made[0].tolist() == [3, 4] and torch.tensor is before

    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        ranks.prepare_mlp_sync_batch(fails)
    assert torch.tensor is before


@pytest.mark.parametrize("to_all", [True, False])
def test_rows_move_between_a_rank_and_all(to_all):
    own, everyone = torch.arange(10.0).view(5, 2), -torch.ones(7, 2)
    first, rows = torch.tensor(2), torch.tensor(3)
    if to_all:
        ranks.copy_rows(everyone, own, 0, first, rows, False)
        assert torch.equal(everyone[2:5], own[:3]) and bool((everyone[[0, 1, 5, 6]] == -1).all())
    else:
        everyone = torch.arange(14.0).view(7, 2)
        ranks.copy_rows(own, everyone, 0, first, rows, True)
        assert torch.equal(own[:3], everyone[2:5]) and torch.equal(own[3:].flatten(), torch.arange(6.0, 10))
    with pytest.raises(AssertionError):
        ranks.copy_rows(everyone, own[:, :1], 0, first, rows, to_all)
