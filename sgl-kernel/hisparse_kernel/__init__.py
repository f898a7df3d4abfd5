"""The data plane of HiSparse: swap-in, write-through store, prefix gather, seeding, reset.

Knows tensors only. Each function runs the CUDA kernel for CUDA tensors and the reference otherwise; signatures and
results are the reference's (`hisparse_kernel.reference`).
"""

from hisparse_kernel.reference import HIT, MISS, TAIL, gather, reset, seed, store_decode, store_extend, swap_in

__all__ = ["HIT", "MISS", "TAIL", "gather", "reset", "seed", "store_decode", "store_extend", "swap_in"]
