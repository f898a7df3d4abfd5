"""Compiles the CUDA sources once per machine and loads them: a cached module through apache-tvm-ffi, no torch headers.

The build directory is named after a hash of the sources, the flags, the target and the tvm-ffi version, below
`TVM_FFI_CACHE_DIR` (default `~/.cache/tvm-ffi`). Building needs `nvcc` and `ninja`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE_DIR = Path(__file__).parent / "csrc"
MODULE_NAME = "hisparse_kernels"
CUDA_FLAGS = ("-O3",)
TARGET = "9.0a"
"""The one compute capability the kernels are built for: they use thread-block clusters and fp8 conversions."""


@functools.cache
def cuda_module() -> Any:
    """The compiled kernels, loaded. Raises RuntimeError where they cannot run or be built."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        raise RuntimeError(f"the HiSparse kernels need compute capability 9.0 (H100, H200), not {major}.{minor}")
    return _tvm_ffi().load_module(build())


def build(build_directory: str | os.PathLike[str] | None = None) -> str:
    """Compile every kernel, unless this very build exists, and return the path of the shared library."""
    directory = Path(build_directory) if build_directory is not None else _cache_dir() / f"hisparse_{source_hash()}"
    # Written last, so that it vouches for the whole library; tvm-ffi itself keeps processes from building at once.
    finished = directory / f"finished_{source_hash()}"
    if not finished.exists():
        _compile(directory)
        finished.touch()
    return str(directory / f"{MODULE_NAME}.so")


def _compile(directory: Path) -> None:
    sources = sorted(SOURCE_DIR.glob("*.cu"))
    with _building_for(TARGET):
        _tvm_ffi().cpp.build(
            MODULE_NAME,
            cuda_files=[str(source) for source in sources],
            extra_cuda_cflags=list(CUDA_FLAGS),
            extra_ldflags=[f"-L{path}" for path in _cuda_library_dirs()],
            build_directory=str(directory),
        )


def source_hash() -> str:
    """Names a build: changes with any source or header, flag, target or tvm-ffi version."""
    digest = hashlib.sha256("\0".join((TARGET, *CUDA_FLAGS, _tvm_ffi().__version__)).encode())
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".cu", ".cuh"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cache_dir() -> Path:
    return Path(os.environ.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")).expanduser()


def _cuda_library_dirs() -> list[Path]:
    """Where libcudart may lie: tvm-ffi looks in `lib64` of the toolkit alone, which not every installation has."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and Path(nvcc).resolve().parent.parent]
    places = [Path(home) / lib for home in homes if home for lib in ("lib64", "lib", "targets/x86_64-linux/lib")]
    return [place for place in places if (place / "libcudart.so").exists()]


@contextmanager
def _building_for(target: str) -> Iterator[None]:
    """tvm-ffi takes the target from the environment, and otherwise asks nvidia-smi, which omits the `a`."""
    name = "TVM_FFI_CUDA_ARCH_LIST"
    before = os.environ.get(name)
    os.environ[name] = target
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _tvm_ffi() -> Any:
    try:
        import tvm_ffi
        import tvm_ffi.cpp
    except ImportError as error:
        raise RuntimeError("the HiSparse kernels need the package apache-tvm-ffi (it comes with SGLang)") from error
    return tvm_ffi
