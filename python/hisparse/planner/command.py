"""`hisparse plan`: options, and what they mean."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hisparse.budget import GIB
from hisparse.config import HiSparseError
from hisparse.planner.hardware import GPU_MEMORY_GIB, default_fraction, gpu_memory_bytes
from hisparse.planner.model import BF16, FP8, load_model
from hisparse.planner.plan import Load, Machine, make_plan
from hisparse.planner.presets import PRESETS
from hisparse.planner.report import report

KV_CACHE_DTYPES = ("bfloat16", "fp8_e4m3")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 2 after one sentence about what cannot be."""
    parser = argparse.ArgumentParser(
        prog="hisparse plan", description="Where every byte goes, how many requests run, and with which flags."
    )
    _add_options(parser)
    options = parser.parse_args(arguments)
    try:
        _check(options)
        _run(options)
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 2
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{', '.join(PRESETS)}, or a directory with a config.json")
    parser.add_argument("--gpu", default="h200", help=f"{', '.join(GPU_MEMORY_GIB)} (default h200)")
    parser.add_argument("--gpu-memory-gib", type=float, help="memory of each GPU, instead of --gpu's")
    parser.add_argument("--gpus", "--tp-size", type=int, default=1, help="GPUs of the server (default 1)")
    parser.add_argument("--dp-size", type=int, default=1, help="attention groups: SGLang's --dp-size (default 1)")
    parser.add_argument("--host-memory-gib", type=float, required=True, help="memory of the host that may be used")
    parser.add_argument("--context-len", type=int, required=True, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=1024, help="tokens of an answer (default 1024)")
    parser.add_argument("--kv-cache-dtype", default="bfloat16", help=f"{' or '.join(KV_CACHE_DTYPES)}")
    parser.add_argument("--requests", type=int, help="at once on the whole server (default: as many as fit)")
    parser.add_argument("--buffer", type=int, help="LRU rows a request (default: from 2 to 4 times top-k)")
    parser.add_argument("--mem-fraction-static", type=float, help="SGLang's (default: SGLang's own rule)")
    parser.add_argument("--weight-dtype", choices=(BF16, FP8), help="instead of what config.json says")
    parser.add_argument("--weights-gib", type=float, help="weights on each GPU, instead of counting them")
    parser.add_argument("--link-gb-s", type=float, help="what the link carries, from `hisparse bench`")
    parser.add_argument("--step-ms", type=float, default=50, help="decode step to aim at (default 50)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw requests and tokens/s against context length")


def _run(options: argparse.Namespace) -> None:
    model = load_model(options.model, weights=options.weight_dtype, count_weights=options.weights_gib is None)
    if options.gpu_memory_gib is not None:
        gpu_bytes = int(options.gpu_memory_gib * GIB)
    else:
        gpu_bytes = gpu_memory_bytes(options.gpu)
    fraction = options.mem_fraction_static
    machine = Machine(
        gpus=options.gpus,
        dp=options.dp_size,
        gpu_bytes=gpu_bytes,
        host_bytes=int(options.host_memory_gib * GIB),
        fraction=default_fraction(gpu_bytes) if fraction is None else fraction,
    )
    load = Load(
        prompt_len=options.context_len,
        output_len=options.output_len,
        kv_cache_dtype=options.kv_cache_dtype,
        buffer=options.buffer,
        requests=options.requests,
        step_s=options.step_ms / 1e3,
    )
    weights_bytes = None if options.weights_gib is None else int(options.weights_gib * GIB)
    plan = make_plan(model, machine, load, weights_bytes=weights_bytes, link_gb_s=options.link_gb_s)
    print(report(plan, "MODEL" if options.model in PRESETS else options.model))
    if options.plot is not None:
        from hisparse.planner.plot import plot

        plot(plan, options.plot, options.link_gb_s)
        print(f"\nPicture: {options.plot}")


def _check(options: argparse.Namespace) -> None:
    """One sentence for the first value that cannot be meant."""
    for name in ("gpus", "dp_size", "context_len", "output_len", "requests", "buffer"):
        _positive(name, getattr(options, name))
    for name in ("gpu_memory_gib", "host_memory_gib", "weights_gib", "link_gb_s", "step_ms"):
        _positive(name, getattr(options, name))
    if options.gpus % options.dp_size:
        raise HiSparseError(
            f"--dp-size {options.dp_size} must divide --gpus {options.gpus}: each group has the same number of GPUs."
        )
    if options.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise HiSparseError(f"--kv-cache-dtype {options.kv_cache_dtype} must be {' or '.join(KV_CACHE_DTYPES)}.")
    fraction = options.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise HiSparseError(f"--mem-fraction-static {fraction} must be between 0 and 1.")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < 1e9:
        raise HiSparseError(f"--{name.replace('_', '-')} {value} must be positive and below a billion.")
