"""The data plane of HiSparse: swap-in, write-through store, prefix gather, seeding, reset.

Knows tensors only. Each function runs the CUDA kernel for CUDA tensors and the reference otherwise; signatures and
results are the reference's (`hisparse_kernel.reference`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hisparse_kernel import cuda_ops, reference
from hisparse_kernel.cuda_ops import warm_up
from hisparse_kernel.reference import HIT, MISS, TAIL

__all__ = ["HIT", "MISS", "TAIL", "gather", "reset", "seed", "store_decode", "store_extend", "swap_in", "warm_up"]

_Op = TypeVar("_Op", bound=Callable[..., Any])


def _by_device(op: _Op, on_cuda: Callable[..., Any], decider: str) -> _Op:
    """`op`, run by `on_cuda` where the argument `decider` is a CUDA tensor."""

    @functools.wraps(op)
    def run(**arguments: Any) -> Any:
        chosen = on_cuda if decider in arguments and arguments[decider].is_cuda else op
        return chosen(**arguments)

    return run  # type: ignore[return-value]


swap_in = _by_device(reference.swap_in, cuda_ops.swap_in, "hot_rows")
store_decode = _by_device(reference.store_decode, cuda_ops.store_decode, "hot_rows")
store_extend = _by_device(reference.store_extend, cuda_ops.store_extend, "workspace")
gather = _by_device(reference.gather, cuda_ops.gather, "workspace")
seed = _by_device(reference.seed, cuda_ops.seed, "hot_rows")
reset = _by_device(reference.reset, cuda_ops.reset, "owners")
