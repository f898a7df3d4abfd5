"""All kernels compile for their target, with registers to spare, and the build is found again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hisparse_kernel import jit

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


@needs_nvcc
def test_every_kernel_compiles_for_the_target(tmp_path: Path) -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    library = Path(jit.build(tmp_path))
    assert library.is_file()
    built = library.stat().st_mtime_ns
    assert Path(jit.build(tmp_path)) == library and library.stat().st_mtime_ns == built
    module = tvm_ffi.load_module(str(library))
    for name in ("swap_in", "store_decode", "store_extend", "gather", "seed", "reset"):
        assert module.implements_function(name)


def test_hash_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    before = jit.source_hash()
    copy = tmp_path / "csrc"
    shutil.copytree(jit.SOURCE_DIR, copy)
    monkeypatch.setattr(jit, "SOURCE_DIR", copy)
    assert jit.source_hash() == before
    with (copy / "hisparse.cuh").open("a") as header:
        header.write("// changed\n")
    assert jit.source_hash() != before
