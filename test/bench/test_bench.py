"""`hisparse bench`: its selections miss what they promise, and what it says without a GPU.

The GPU's part runs here with the reference in the kernels' place, so that only the timing itself is not exercised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hisparse.bench import command, host, link, setup, swap_in, timing
from hisparse.cli import main
from hisparse_kernel import reference


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep on CPU tensors, small, by the reference; a step's time is the number of its calls."""
    for name, value in {"DEVICE": "cpu", "TOP_K": 128, "CONTEXT": 2048}.items():
        monkeypatch.setattr(setup, name, value)
    operations = SimpleNamespace(
        swap_in=reference.swap_in, gather=reference.gather, launch_shape=swap_in.cuda_ops.launch_shape, GATHER_CTAS=32
    )
    for module in (setup, swap_in, link):
        monkeypatch.setattr(module, "cuda_ops", operations)
    monkeypatch.setattr(link, "DEVICE", "cpu")
    monkeypatch.setattr(link, "ROWS", 64)
    monkeypatch.setattr(link, "NEAR_TOKENS", 256)
    monkeypatch.setattr(link, "COPY_BYTES", 4096)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def run_all(self: timing.Timing, steps: Sequence[Callable[[], Any]]) -> float:
        for _ in range(2):
            for step in steps:
                step()
        return 10.0

    monkeypatch.setattr(timing.Timing, "device_us", run_all)
    monkeypatch.setattr(timing.Timing, "empty_us", lambda self: 3.0)


@pytest.fixture
def pool() -> setup.HostPool:
    made = object.__new__(setup.HostPool)
    made._bytes = torch.randint(0, 256, (16 * 4096 * 8,), dtype=torch.uint8)
    return made


@pytest.mark.usefixtures("without_cuda")
def test_every_step_misses_the_share_asked_for(pool: setup.HostPool) -> None:
    sweep = swap_in.Sweep(
        batches=[1, 3], misses=[0, 5, 20, 100], rows=[16, 32], slots=["near", "far"], buffers=[256], pool_gb=0
    )
    seen: list[dict[str, Any]] = []
    lines = sweep.run(pool, line_done=seen.append, part_done=lambda lines: None)
    assert len(lines) == 2 * 4 * 2 * 2 and seen == lines
    for line in lines:
        expected = round(128 * line["miss_percent"] / 100) * line["batch"]
        assert line["misses_seen"] == line["misses"] == expected
        assert line["gather_us"] == (10.0 if expected else 3.0)
        assert line["gb_per_s"] == pytest.approx(expected * line["row_bytes"] / 10.0 / 1000)
        assert line["default"] is True
    assert swap_in.table(lines).count("\n") == 1 + len(lines)


@pytest.mark.usefixtures("without_cuda")
def test_a_peer_and_other_shapes_are_lines_of_their_own(pool: setup.HostPool) -> None:
    class Peer:
        def __init__(self, layer: setup.Layer, steps: setup.Steps) -> None:
            assert layer.req_to_host is not None

        def swap_in(self, i: int) -> None: ...

    shapes = [swap_in.cuda_ops.launch_shape(1), swap_in.cuda_ops.launch_shape(200)]
    sweep = swap_in.Sweep([1], [5], [16], ["near"], [256], 0, shapes=shapes, peer_of=Peer)
    lines = sweep.run(pool, line_done=lambda line: None, part_done=lambda lines: None)
    assert [line["shape"] for line in lines] == ["1024x8x0", "512x1x8"]
    assert [line["default"] for line in lines] == [True, False]
    assert all(line["peer_us"] == 10.0 for line in lines)


def test_the_verdict() -> None:
    line = {"ours_us": 9.0, "limit_us": 10.0, "misses": 0, "misses_seen": 0, "batch": 8, "peer_us": 20.0}
    assert swap_in.verdict(line) == "zero-miss limit"
    assert swap_in.verdict({**line, "ours_us": 5.0}) == ""
    assert swap_in.verdict({**line, "ours_us": 21.0, "misses_seen": 3}) == "limit, zero-miss limit, peer, misses 3"


@pytest.mark.usefixtures("without_cuda")
def test_the_link_is_read_near_and_far(pool: setup.HostPool) -> None:
    assert link.copy_rates(pool, timing.Timing()) == pytest.approx((4096 / 10 / 1000,) * 2)
    rate = link.row_rate(pool, 16, timing.Timing())
    assert rate == pytest.approx((16, 64 * 16 / 10 / 1000, 64 * 16 / 10 / 1000))
    near, far = link.slot_sets(4096, 256), link.slot_sets(4096, 4096)
    assert all(len(set(slots.tolist())) == 64 for slots in (*near, *far))
    assert all(int(slots.max() - slots.min()) < 256 for slots in near)
    assert min(int(slots.max() - slots.min()) for slots in far) > 2048
    assert "hisparse plan --link-gb-s" in link.text(55.0, 54.0, [rate])


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "cuda_devices", lambda: 0)
    monkeypatch.setattr(host, "PROMPT", 8192)
    arguments = ["bench", "--batches", "1", "--misses", "0", "5", "--pool-gb", "0.5", "--out", str(tmp_path / "f.json")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "no GPU found. Not measured:" in text and "the CUDA swap-in kernel" in text
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [row["row_bytes"] for row in figures["rows"]] == [656, 1152]
    assert all(row["copy_gb_s"] > 0 and row["gather_gb_s"] > 0 for row in figures["rows"])
    assert [(cell["batch"], cell["miss_percent"]) for cell in figures["swap_in"]] == [(1, 0), (1, 5)]


@pytest.mark.parametrize(
    ("more", "sentence"),
    (
        (("--batches", "0"), "--batches 0 must be from 1 to 1024."),
        (("--misses", "101"), "--misses 101 must be from 0 to 100."),
        (("--rows", "100"), "--rows 100 must be a multiple of 16."),
        (("--slots", "middle"), "--slots middle must be near or far."),
        (("--buffer", "100"), "--buffer 100 must be a multiple of 64"),
        (("--pool-gb", "1e6"), "--pool-gb 1e+06 must be from 0.5 to"),
    ),
)
def test_a_bad_option_gets_one_sentence(
    more: tuple[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *more]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("hisparse: error: ") and sentence in output.err and output.err.count("\n") == 1
