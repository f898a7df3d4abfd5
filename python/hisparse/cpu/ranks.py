"""Several ranks of one server on the cores of one machine."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch


def share_of_cores(cores: Sequence[int], rank: int, ranks: int) -> list[int]:
    """The cores of one rank: equal runs of neighbours, the first ranks one more where they do not divide; one core for
    several ranks where there are fewer cores than ranks."""
    if len(cores) < ranks:
        return [cores[rank % len(cores)]]
    each, left = divmod(len(cores), ranks)
    first = rank * each + min(rank, left)
    return list(cores[first : first + each + (rank < left)])


def init_threads_binding(original: Callable[..., str], *, tp_rank: int, tp_size: int) -> str:
    """``numa_utils.init_threads_binding``, where the user has not set SGLANG_CPU_OMP_THREADS_BIND.

    Returns:
        the rank's cores as SGLang writes them, for example ``"0,1"``.
    """
    if tp_size == 1 or os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "all") != "all":
        return original(tp_rank=tp_rank, tp_size=tp_size)
    share = share_of_cores(sorted(os.sched_getaffinity(0)), tp_rank, tp_size)
    # SGLang binds threads with an operator that is absent here. The kernel's scheduler places them well enough if they
    # are not more than the cores.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(share))
    return ",".join(map(str, share))


def prepare_mlp_sync_batch(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """``ForwardBatch.prepare_mlp_sync_batch`` with an ordinary tensor for the one that it wants in pinned memory."""
    tensor = torch.tensor

    def unpinned(*given: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return tensor(*given, **named)

    torch.tensor = unpinned  # type: ignore[assignment]
    try:
        original(*args, **kwargs)
    finally:
        torch.tensor = tensor


def copy_rows(
    dst: torch.Tensor, src: torch.Tensor, dim: int, offset: torch.Tensor, sz: torch.Tensor, offset_src: bool
) -> None:
    """``memcpy_triton``: ``sz`` rows between a rank's own tensor and its place, ``offset``, in that of all ranks.

    Args:
        dst, src: ``[rows, ...]``, equal behind the first dimension.
        dim: 0.
        offset, sz: int scalars, in rows.
        offset_src: whether ``src`` is the tensor of all ranks; else ``dst`` is.
    """
    assert dim == 0 and src.shape[1:] == dst.shape[1:], (dim, src.shape, dst.shape)
    first, rows = int(offset), int(sz)
    if offset_src:
        dst[:rows].copy_(src[first : first + rows])
    else:
        dst[first : first + rows].copy_(src[:rows])


def all_gather_into_tensor(self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """``GroupCoordinator.all_gather_into_tensor`` without the operator that hides the call from torch.compile."""
    self._all_gather_into_tensor(output, input)


def reduce_scatter_tensor(self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """``GroupCoordinator.reduce_scatter_tensor``, likewise."""
    self._reduce_scatter_tensor(output, input)
