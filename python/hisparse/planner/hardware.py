"""GPUs, and what SGLang keeps of their memory."""

from __future__ import annotations

from hisparse.budget import GIB
from hisparse.config import HiSparseError

GPU_MEMORY_GIB = {"h100": 79.1, "h200": 139.8, "h20": 95.1}
"""Memory that CUDA reports, not the name on the box. GPUs of sm_90, the only architecture the kernels are for."""

RUNTIME_BYTES = 2 * GIB
"""CUDA context, NCCL and cuBLAS before the weights are loaded: an assumption."""

RESERVE_BYTES = int(14.5 * GIB)
"""What SGLang 0.5.17 keeps back for activations and graphs at its defaults for such GPUs: chunks of 8,192 tokens,
decode graphs up to batch 512, tensor parallel 8. Sets the default of --mem-fraction-static here."""


def gpu_memory_bytes(gpu: str) -> int:
    if gpu not in GPU_MEMORY_GIB:
        raise HiSparseError(
            f"--gpu {gpu} must be one of {', '.join(GPU_MEMORY_GIB)}; for another GPU give --gpu-memory-gib."
        )
    return int(GPU_MEMORY_GIB[gpu] * GIB)


def default_fraction(memory_bytes: int) -> float:
    """--mem-fraction-static, rounded down to a hundredth, that leaves `RESERVE_BYTES`; a tenth of a smaller GPU."""
    reserve = RESERVE_BYTES if memory_bytes > 4 * RESERVE_BYTES else memory_bytes // 10
    return int((memory_bytes - reserve) / memory_bytes * 100) / 100
