"""What must change in SGLang's modules on the CPU and is not a function that a hook can replace."""

from types import SimpleNamespace
from typing import Any

from hisparse.cpu.index_logits import paged_mqa_logits


def _assume_hopper(*_: Any, **__: Any) -> tuple[int, int]:
    return (9, 0)


def patch_modules() -> None:
    """Set the module globals that SGLang's DSA code reads. Call before the model is built, in every process that builds
    one.
    """
    import torch
    from sglang.srt.layers.attention.dsa import dsa_indexer

    # The back end asks for the compute capability when it is constructed, to choose between kernels that we replace
    # either way; without a GPU torch raises. 9.0 selects the code path that the hooks are written for.
    torch.cuda.get_device_capability = _assume_hopper
    # dsa_indexer imports deep_gemm under `if cuda`, and uses the name without that condition.
    dsa_indexer.deep_gemm = SimpleNamespace(fp8_paged_mqa_logits=paged_mqa_logits)
