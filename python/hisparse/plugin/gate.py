"""The version gate. SGLang only logs a plug-in that fails and a hook whose target is gone; serving without the hooks
would silently mean another product, so we look first and stop the server with one sentence."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import psutil

from hisparse.config import HiSparseError
from hisparse.hook_row import HookRow

SUPPORTED_SGLANG = "0.5.17"

WORKER_TITLE = "sglang::"
"""How the names that SGLang gives its processes begin, the launcher's excepted."""


def problems() -> list[str]:
    """What keeps the hooks from fitting, a sentence each; empty when everything fits."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [f"SGLang is not installed; this version of HiSparse needs sglang=={SUPPORTED_SGLANG}."]
    if version != SUPPORTED_SGLANG:
        return [f"SGLang {version} is installed but this version of HiSparse supports sglang=={SUPPORTED_SGLANG} only."]
    return [f"SGLang {version} has no {row.target} ({row.why})." for row in hooks() if not target_exists(row.target)]


def hooks() -> tuple[HookRow, ...]:
    """All hooks of this process: HiSparse's, and without a GPU those of the CPU operators."""
    from hisparse import cpu
    from hisparse.plugin.hooks import HOOKS

    if not cpu.active():
        return HOOKS
    from hisparse.cpu.hooks import CPU_HOOKS

    return CPU_HOOKS + HOOKS


def target_exists(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def refuse(sentences: Sequence[str]) -> None:
    """Stop a server that asks for HiSparse; leave one that does not alone.

    On the command line the flag can be seen here. Elsewhere (an `Engine`) it is known when the server arguments are
    made, so that is where a hook refuses; if even that place is gone, everything stops.
    """
    message = "HiSparse cannot run: " + " ".join(sentences)
    guard = "sglang.srt.server_args.ServerArgs.__post_init__"
    if "--enable-hisparse" in sys.argv or not target_exists(guard):
        raise SystemExit(message)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def refuse_if_asked_for(server_args: object) -> None:
        if getattr(server_args, "enable_hisparse", False):
            raise HiSparseError(message)

    HookRegistry.register(guard, refuse_if_asked_for, HookType.BEFORE)


@contextmanager
def stopping_the_server() -> Iterator[None]:
    """Turn a `HiSparseError` in a scheduler process into its sentence and the end of the server.

    SGLang would log the traceback of anything that escapes there. Like SGLang after that, we tell the launcher with
    SIGQUIT, which ends all its children.
    """
    try:
        yield
    except HiSparseError as error:
        if multiprocessing.parent_process() is None:
            raise
        print(f"hisparse: error: {error}", file=sys.stderr, flush=True)
        os.kill(launcher(psutil.Process()).pid, signal.SIGQUIT)
        raise SystemExit(1) from None


def launcher(scheduler: psutil.Process) -> psutil.Process:
    """The process that started the server: the parent, or with data parallelism the parent of the controller. If that
    one ended first, the launcher would take it for a crash."""
    process = scheduler.parent()
    while (above := process.parent()) is not None and "".join(process.cmdline()[:1]).startswith(WORKER_TITLE):
        process = above
    return process


def report_errors_in_one_sentence() -> None:
    """Print a `HiSparseError` that nobody caught as its sentence, without the traceback. Exit status stays 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, HiSparseError):
            print(f"hisparse: error: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook
