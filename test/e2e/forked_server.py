"""`hisparse serve` on the CPU whose processes are forked from the launcher once everything is imported.

Each process that SGLang spawns imports for 13 s of a core; with two ranks and two servers that is most of a test's
time. Nothing else differs. The servers that most tests share, and those that are started to see them start, are
spawned.
"""

import multiprocessing
import os
import runpy
import sys

from hisparse.cpu.environment import cpu_environment, cpu_server_args


def keep_fork(method: str, force: bool = False) -> None:
    """In place of `set_start_method`, with which SGLang asks for spawn; on CUDA it could not do otherwise."""


if __name__ == "__main__":
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        os.environ.update(cpu_environment())
        os.execv(sys.executable, [sys.executable, *sys.argv, *cpu_server_args(sys.argv[1:])])
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = keep_fork  # type: ignore[assignment]
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    runpy.run_module("sglang.launch_server", run_name="__main__")
