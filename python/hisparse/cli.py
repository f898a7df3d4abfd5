"""The `hisparse` command."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from hisparse.cpu.environment import cpu_environment, cpu_server_args, explain
from hisparse.device import cuda_devices


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hisparse",
        description="SGLang with the full KV cache in host memory and a small hot buffer a request on the device.",
        epilog="docs/README.md lists the pages of the documentation; docs/configuration.md has every key of "
        "--hisparse-config.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "serve",
        add_help=False,
        help="start SGLang's server; every flag is SGLang's, --enable-hisparse turns HiSparse on",
    )
    commands.add_parser("doctor", help="say whether this machine can run it, and what is missing")
    demo = commands.add_parser("demo", help="serve a small model with HiSparse on and off and compare")
    demo.add_argument("--keep", action="store_true", help="keep the server logs and say where they are")
    commands.add_parser("plan", add_help=False, help="how many requests fit, where every byte goes, which flags to use")
    commands.add_parser("simulate", add_help=False, help="replay recorded selections with other buffers and policies")
    commands.add_parser("bench", add_help=False, help="measure this machine: link, near and far slots, swap-in")
    try:
        return _run(parser, argv)
    except ModuleNotFoundError as error:  # installed without what it needs
        print(
            f"hisparse: error: Python package {error.name} is not installed here; `make install` installs all that a "
            f"machine without a GPU needs, `pip install sglang==0.5.17` what one with a GPU needs.",
            file=sys.stderr,
        )
        return 2


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    # These have options of their own; `serve` hands every word on, also those that look like options of ours.
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        return serve(arguments[1:])
    if arguments[:1] == ["plan"]:
        from hisparse.planner.command import main as plan

        return plan(arguments[1:])
    if arguments[:1] == ["simulate"]:
        from hisparse.simulator.command import main as simulate

        return simulate(arguments[1:])
    if arguments[:1] == ["bench"]:
        from hisparse.bench.command import main as bench

        return bench(arguments[1:])
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from hisparse.doctor import doctor

        return doctor()
    from hisparse.demo import demo as run_demo

    return run_demo(keep=options.keep)


def serve(arguments: list[str]) -> int:
    """Become SGLang's launcher. Without a GPU, first set what it needs to run there, and say so.

    Args:
        arguments: SGLang's server flags.

    Returns:
        2 if a flag cannot work here; otherwise it does not return.
    """
    selected = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if "--enable-hisparse" in arguments and selected and "hisparse" not in selected:
        # SGLang's own HiSparse would answer the flag, and nothing would say so.
        print(
            f"hisparse: error: SGLANG_PLUGINS={','.join(selected)} leaves out hisparse; add it or unset the variable.",
            file=sys.stderr,
        )
        return 2
    if importlib.util.find_spec("sglang") is None:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    if cuda_devices() == 0:
        try:
            added = cpu_server_args(arguments)
        except ValueError as error:
            print(f"hisparse: error: {error}", file=sys.stderr)
            return 2
        print("hisparse: no GPU found, running on the CPU. Set for SGLang:")
        for line in explain(arguments):
            print(f"  {line}")
        os.environ.update(cpu_environment())
        arguments = [*arguments, *added]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *arguments])


if __name__ == "__main__":
    sys.exit(main())
