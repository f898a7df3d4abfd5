"""What HiSparse adds to a decode step on the CPU back end: on and off in one run, in turn, as a ratio.

    python benchmark/serving/bench_cpu_decode.py [--layers 4] [--batch 8] [--index-topk 256] [--buffer 512]

A step's time is (time for NEW tokens - time for 1 token) / (NEW - 1), with the prompts cached, so prefill and HTTP
cancel. Both servers run at once and are asked alternately; the idle one sleeps.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from hisparse.cpu.checkpoint import make_checkpoint
from hisparse.local_server import LocalServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--index-topk", type=int, default=256)
    parser.add_argument("--buffer", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=3000, help="tokens a prompt")
    parser.add_argument("--new", type=int, default=33, help="tokens generated a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--style", choices=("conditioned", "plain"), default="conditioned")
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="hisparse-bench-"))
    make_checkpoint(folder / "model", style=options.style, layers=options.layers, index_topk=options.index_topk)
    flags = ("--context-length", "8192", "--max-total-tokens", "32768", "--max-running-requests", str(options.batch))
    config = f'{{"device_buffer_size": {options.buffer}}}'
    source = random.Random(0)
    prompts = [[source.randrange(2, 250) for _ in range(options.prompt)] for _ in range(options.batch)]
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                LocalServer(folder / "model", *flags, *extra, "--sleep-on-idle", log=folder / f"{name}.log")
            )
            for name, extra in (("on", ("--enable-hisparse", "--hisparse-config", config)), ("off", ()))
        }
        for server in servers.values():
            _seconds(server, prompts, 1)
        steps: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(options.rounds):
            for name, server in servers.items():
                short = _seconds(server, prompts, 1)
                steps[name].append((_seconds(server, prompts, options.new) - short) / (options.new - 1))
        state = servers["on"].hisparse_state()
    assert state is not None
    on, off = (statistics.median(steps[name]) * 1e3 for name in ("on", "off"))
    ratio = statistics.median(a / b for a, b in zip(steps["on"], steps["off"], strict=True))
    print(f"machine: {platform.processor() or platform.machine()}, {platform.platform()}; {options}")
    print(f"ms a step, median of {options.rounds}: on {on:.1f}, off {off:.1f}; ratio (median of pairs) {ratio:.3f}")
    print(f"hit rate {state['hit_rate']:.1%}")


def _seconds(server: LocalServer, prompts: list[list[int]], tokens: int) -> float:
    started = time.perf_counter()
    server.generate(prompts, max_new_tokens=tokens, ignore_eos=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
