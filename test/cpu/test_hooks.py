"""The table of hooks: complete rows, every target present in the installed SGLang, importing it costs no SGLang."""

import os
import subprocess
import sys

from hisparse.cpu.environment import cpu_environment
from hisparse.cpu.hooks import CPU_HOOKS


def test_rows():
    assert len({row.target for row in CPU_HOOKS}) == len(CPU_HOOKS)
    for row in CPU_HOOKS:
        assert (
            row.target.startswith("sglang.")
            and row.kind in ("replace", "around")
            and callable(row.function)
            and row.why
        )


def test_importing_the_table_imports_no_sglang():
    code = "import sys, hisparse.cpu, hisparse.cpu.hooks; print('sglang' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_registered_hooks_reach_every_target():
    """In a process of its own: hooks change SGLang for good."""
    code = """
import hisparse.cpu, pkgutil
from hisparse.cpu.hooks import CPU_HOOKS
from sglang.srt.plugins.hook_registry import HookRegistry
assert hisparse.cpu.active()
hisparse.cpu.register()
HookRegistry.apply_hooks()
for row in CPU_HOOKS:
    module, _, name = row.target.rpartition(".")
    assert hasattr(getattr(pkgutil.resolve_name(module), name), "__wrapped__"), row.target
import torch
from sglang.srt.layers.attention.dsa import dsa_indexer
assert dsa_indexer.deep_gemm.fp8_paged_mqa_logits and torch.cuda.get_device_capability() == (9, 0)
print("hooked", len(HookRegistry._patched))
"""
    environment = {**os.environ, **cpu_environment(), "SGLANG_PLUGINS": "none"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip().endswith(f"hooked {len(CPU_HOOKS)}")
