"""What SGLang 0.5.17 needs to serve DSA models without a GPU: operators on plain torch, shims for absent packages, and
settings.

Nothing here knows about HiSparse: with it on or off, the same operators run.

- ``environment``: variables and server flags, for whoever starts the server
- ``shims``: packages that SGLang imports and that need CUDA or are not worth their size
- ``hooks``, ``patches``: what is replaced inside SGLang, with the reasons
- ``checkpoint``: makes a small random checkpoint to serve

Importing this package, or any module in it, imports neither SGLang nor a shim.
"""

import os


def active() -> bool:
    """Whether this process is to run SGLang without a GPU: SGLANG_USE_CPU_ENGINE is 1 and torch sees no CUDA device."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return False
    import torch

    return not torch.cuda.is_available()


def register() -> None:
    """Register the hooks with SGLang's HookRegistry and patch its modules. For a plug-in's entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hisparse.cpu.hooks import CPU_HOOKS
    from hisparse.cpu.patches import patch_modules

    patch_modules()
    for row in CPU_HOOKS:
        HookRegistry.register(row.target, row.function, HookType(row.kind))
