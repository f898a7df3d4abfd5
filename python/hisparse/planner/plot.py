"""Concurrency and throughput against the length of the context."""

from __future__ import annotations

from pathlib import Path

from hisparse.config import HiSparseError
from hisparse.planner.plan import HIT_RATES, Plan, plan_by_context
from hisparse.plotting import require_matplotlib


def plot(plan: Plan, path: Path, link_gb_s: float | None) -> None:
    """Write a picture. Raises `HiSparseError` if matplotlib is missing or the file's kind is unknown to it."""
    pyplot = require_matplotlib()
    lengths = context_lengths(plan)
    plans = plan_by_context(plan, lengths, link_gb_s)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    dp = plan.machine.dp
    some = [(length, one) for length, one in zip(lengths, plans, strict=True) if one is not None]
    where = [length for length, _ in some]
    left.plot(where, [one.requests * dp for _, one in some], marker="o", label="with HiSparse")
    left.plot(where, [one.requests_without * dp for _, one in some], marker="s", label="without")
    left.set(xlabel="prompt, tokens", ylabel="requests at once, whole server", yscale="symlog")
    for hit_rate in HIT_RATES:
        rates = [_tokens_per_s(one, hit_rate) for _, one in some]
        right.plot(where, rates, marker="o", label=f"{hit_rate:.0%} hits")
    without = [one.requests_without * dp / one.load.step_s for _, one in some]
    right.plot(where, without, marker="s", color="gray", label="without HiSparse")
    right.set(
        xlabel="prompt, tokens",
        ylabel="output tokens/s, upper limit",
        yscale="symlog",
        title=f"steps of {plan.load.step_s * 1e3:g} ms, or of what the link takes",
    )
    left.set(title=f"{plan.model.name}, {plan.machine.gpus} GPUs, KV {plan.load.kv_cache_dtype}")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}k")
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise HiSparseError(f"--plot {path} cannot be written: {error}.") from None
    finally:
        pyplot.close(figure)


def context_lengths(plan: Plan) -> list[int]:
    """Powers of two from 4,096 (or less for a small model) to the model's limit."""
    longest = plan.model.max_position_embeddings - plan.load.output_len
    lengths = [2**power for power in range(8, 31) if 2**power <= longest]
    return [length for length in lengths if length >= min(4096, longest // 4)]


def _tokens_per_s(plan: Plan, hit_rate: float) -> float:
    """Every running request one token a step; a step takes what was aimed at, or what copying needs."""
    return plan.requests * plan.machine.dp / max(plan.load.step_s, plan.link_step_s(hit_rate))
