"""How HiSparse sits in SGLang: the only room, besides `cpu`, that imports it.

`register` is the entry point of the group `sglang.srt.plugins`; SGLang calls it in every process before it does
anything else. `hooks.HOOKS` lists every place where SGLang's behaviour changes.
"""

from __future__ import annotations


def register() -> None:
    """Check that this SGLang is the supported one and register the hooks; stop the process if it is not."""
    from hisparse.plugin import gate

    gate.report_errors_in_one_sentence()
    problems = gate.problems()
    if problems:
        gate.refuse(problems)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hisparse import cpu
    from hisparse.plugin.hooks import HOOKS

    if cpu.active():
        cpu.register()
    for row in HOOKS:
        HookRegistry.register(row.target, row.function, HookType(row.kind))
