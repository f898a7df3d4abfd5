"""The host pool: refused with its size before anything is allocated, and laid out as one block."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hisparse.budget import GIB
from hisparse.config import HiSparseError
from hisparse.memory import HostPool, free_memory_bytes, host_pool, require_free_memory


@pytest.fixture
def one_gib_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "free_memory_bytes", lambda: GIB)


def test_layout() -> None:
    pool = HostPool(layers=3, slots=40, row_bytes=64, pin=False)
    assert (pool.rows.shape, pool.rows.dtype, pool.rows.device.type) == ((3, 40, 64), torch.uint8, "cpu")
    assert pool.rows.is_contiguous()
    assert pool.rows.data_ptr() % 16 == 0
    assert (pool.nbytes, pool.slots, pool.pinned) == (3 * 40 * 64, 40, False)
    assert pool.rows.untyped_storage().nbytes() == pool.nbytes
    pool.rows[1, 7] = 9
    assert pool.rows[1].data_ptr() == pool.rows.data_ptr() + 40 * 64, "a layer is a view, not a copy"


@pytest.mark.usefixtures("one_gib_free")
def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*args: object, **kwargs: object) -> None:
        raise AssertionError("allocated without asking")

    monkeypatch.setattr(torch, "empty", allocated)
    layers, slots, row_bytes = 61, 2**20, 656
    with pytest.raises(HiSparseError) as error:
        HostPool(layers=layers, slots=slots, row_bytes=row_bytes, pin=False)
    message = str(error.value)
    assert f"needs {layers * slots * row_bytes / GIB:.2f} GiB" in message
    assert "only 0.95 GiB of host memory can be used (1.00 GiB free, 5% kept back)" in message
    assert "--hisparse-config host_memory_gib" in message and "--max-total-tokens" in message
    assert message.endswith(".") and ". " not in message


@pytest.mark.usefixtures("one_gib_free")
def test_the_reserve_is_kept_to_the_byte() -> None:
    usable = int(GIB * 0.95)
    require_free_memory(usable)
    with pytest.raises(HiSparseError):
        require_free_memory(usable + 1)


@pytest.mark.usefixtures("one_gib_free")
def test_pools_of_several_processes_are_added_up() -> None:
    require_free_memory(GIB // 5, processes=4)
    with pytest.raises(HiSparseError, match=r"needs 1.00 GiB \(4 processes with 0.25 GiB each\) but only 0.95 GiB"):
        require_free_memory(GIB // 4, processes=4)


def test_free_memory_that_was_measured_before_counts() -> None:
    require_free_memory(94, free=100)
    with pytest.raises(HiSparseError):
        require_free_memory(96, free=100)


def fake_root(path: Path, *, limit: str, current: int, inactive: int) -> Path:
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{current}\n")
    (path / "memory.stat").write_text(f"anon 5\nfile 9\ninactive_file {inactive}\nactive_file 2\n")
    return path


@pytest.mark.parametrize(
    ("limit", "current", "inactive", "free"),
    (
        ("max", 10, 0, 1000),  # no limit: the machine's free memory
        ("700", 300, 0, 400),
        ("700", 300, 50, 450),  # idle file cache is given back on demand
        ("9000", 100, 0, 1000),  # the limit is beyond what the machine has
        ("700", 900, 0, 0),  # over the limit
    ),
)
def test_free_memory_respects_the_containers_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, current: int, inactive: int, free: int
) -> None:
    fake = fake_root(tmp_path, limit=limit, current=current, inactive=inactive)
    monkeypatch.setattr(host_pool, "Path", lambda path: fake if path == "/sys/fs/cgroup" else Path(path))
    monkeypatch.setattr(host_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert free_memory_bytes() == free


def test_a_machine_without_that_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_pool, "Path", lambda path: tmp_path)
    monkeypatch.setattr(host_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert free_memory_bytes() == 1000


def test_memory_that_cuda_cannot_pin_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cudaHostRegister=lambda *args: 2, cudaHostUnregister=lambda *args: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(HiSparseError, match=r"could not pin the host pool of 0\.0 GiB .*ulimit -l.*\.$"):
        HostPool(layers=1, slots=16, row_bytes=64, pin=True)


def test_a_pinned_pool_registers_its_whole_block_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(("register", *args)) or 0,
        cudaHostUnregister=lambda *args: calls.append(("unregister", *args)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    pool = HostPool(layers=2, slots=16, row_bytes=64, pin=True)
    address = pool.rows.data_ptr()
    assert pool.pinned
    assert calls == [("register", address, 2 * 16 * 64, 0)]
    del pool
    assert calls[1:] == [("unregister", address)]
