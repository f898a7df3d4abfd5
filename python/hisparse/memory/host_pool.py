"""The host pool: the only full-size store of rows, addressed by SGLang's slots."""

from __future__ import annotations

import math
import weakref
from pathlib import Path

import psutil
import torch

from hisparse.budget import GIB
from hisparse.config import HiSparseError

FREE_MEMORY_RESERVE = 0.05
"""Share of the free memory that the pool may never take, so that the machine stays usable."""


class HostPool:
    """`[layers][slots][row]` in host memory, pinned where CUDA is present.

    `rows[layer][slot]` is the row of a token whichever request it belongs to, so prefix reuse, retraction and
    eviction are SGLang's business alone: nothing here changes when a slot changes hands. Slots 0..page_size-1 are
    SGLang's padding page. One allocation serves all layers, so that it is pinned with one call.

    Attributes:
        rows: uint8 [layers, slots, row_bytes] on the CPU.
        pinned: whether the device can read it directly.
    """

    def __init__(self, *, layers: int, slots: int, row_bytes: int, pin: bool) -> None:
        """Raises `HiSparseError` when the free memory does not hold the pool, before touching it."""
        nbytes = layers * slots * row_bytes
        require_free_memory(nbytes)
        self.rows = torch.empty((layers, slots, row_bytes), dtype=torch.uint8)
        self.pinned = False
        if pin:
            self._pin(nbytes)

    def _pin(self, nbytes: int) -> None:
        # Registered, not allocated with pin_memory=True: torch's pinned allocator may round up to a power of two,
        # which for a pool of half the machine's memory does not fit. Filling it first faults the pages in on all cores.
        self.rows.zero_()
        address = self.rows.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(status) != 0:
            raise HiSparseError(
                f"CUDA could not pin the host pool of {nbytes / GIB:.1f} GiB (cudaHostRegister: {status}); lower "
                f"--hisparse-config host_memory_gib or raise the limit of locked memory (`ulimit -l`)."
            )
        self.pinned = True
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    @property
    def slots(self) -> int:
        return self.rows.shape[1]


def free_memory_bytes() -> int:
    """Host memory that can be used without swapping, within the container's limit if there is one."""
    free = psutil.virtual_memory().available
    limit = _cgroup_free_bytes()
    return free if limit is None else min(free, limit)


def require_free_memory(nbytes: int, *, processes: int = 1, free: int | None = None) -> None:
    """Raise `HiSparseError` with the sum if pools of `nbytes`, one of each of `processes`, do not fit the host memory.

    Args:
        free: free host memory before any of them was made, in bytes; None = look now.
    """
    free = free_memory_bytes() if free is None else free
    usable = math.floor(free * (1 - FREE_MEMORY_RESERVE))
    if nbytes * processes > usable:
        each = "" if processes == 1 else f" ({processes} processes with {nbytes / GIB:.2f} GiB each)"
        raise HiSparseError(
            f"the host pool needs {nbytes * processes / GIB:.2f} GiB{each} but only {usable / GIB:.2f} GiB of host "
            f"memory can be used ({free / GIB:.2f} GiB free, {FREE_MEMORY_RESERVE:.0%} kept back); lower "
            f"--hisparse-config host_memory_gib or --max-total-tokens."
        )


def _cgroup_free_bytes() -> int | None:
    """Bytes left under the cgroup v2 memory limit, None where there is no limit. Idle file cache counts as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return None if limit == "max" else max(int(limit) - used + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None
