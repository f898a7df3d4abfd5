"""A plan as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from hisparse.budget import GIB
from hisparse.planner.hardware import RUNTIME_BYTES
from hisparse.planner.plan import HIT_RATES, Plan

WIDTH = 100


def report(plan: Plan, model_path: str) -> str:
    """The whole report; `model_path` goes into the command."""
    return "\n\n".join(
        (_head(plan), _bytes(plan), _concurrency(plan), _link(plan), _command(plan, model_path), _assumptions(plan))
    )


def _head(plan: Plan) -> str:
    model, machine, load = plan.model, plan.machine, plan.load
    groups = f", {machine.dp} attention groups of {machine.gpus // machine.dp}" if machine.dp > 1 else ""
    return (
        f"{model.name}: {model.parameters / 1e6:,.1f} million parameters in {model.weights}, "
        f"{model.num_hidden_layers} layers, top-k {model.index_topk}\n"
        f"{machine.gpus} GPU{'s' if machine.gpus > 1 else ''} of {machine.gpu_bytes / GIB:.1f} GiB{groups}, "
        f"{machine.host_bytes / GIB:,.0f} GiB of host memory\n"
        f"requests of {load.prompt_len:,} + {load.output_len:,} tokens, KV {load.kv_cache_dtype} "
        f"({plan.budget.row_bytes} B a token and layer)"
    )


def _bytes(plan: Plan) -> str:
    budget, machine = plan.budget, plan.machine
    weights = sum(plan.weights.values())
    lines = [("weights", part, nbytes, "") for part, nbytes in plan.weights.items()]
    lines += [
        ("KV", "indexer keys", budget.index_keys_bytes, f"of {budget.slots:,} tokens, all of the host pool"),
        ("KV", "hot rows", budget.hot_rows_bytes, f"{budget.regions} regions, one of them SGLang's padding"),
        ("KV", "residency state", budget.residency_bytes, ""),
        ("KV", "prefill workspace", budget.workspace_bytes,
         f"{budget.config.workspaces} x {budget.config.workspace_tokens:,} rows"),
        ("KV", "step buffers", budget.step_bytes, ""),
        ("KV", "not used", plan.kv_bytes - budget.device_bytes, ""),
        ("kept back", "activations, graphs", machine.gpu_bytes - RUNTIME_BYTES - machine.static_bytes,
         f"--mem-fraction-static {machine.fraction}"),
        ("kept back", "CUDA, NCCL", RUNTIME_BYTES, "assumed"),
    ]  # fmt: skip
    rows = [(where, what, f"{nbytes / GIB:.3f}", note) for where, what, nbytes, note in lines]
    rows.append(
        ("total", "", f"{machine.gpu_bytes / GIB:.3f}", f"weights {weights / GIB:.3f}, KV {plan.kv_bytes / GIB:.3f}")
    )
    pools = (
        ""
        if machine.gpus == 1
        else f"; {machine.gpus} processes keep one each, {machine.gpus * budget.host_pool_bytes / GIB:,.1f} GiB"
    )
    rows.append(("host", "pool", f"{budget.host_pool_bytes / GIB:.3f}", f"{budget.slots:,} tokens{pools}"))
    return _table(("where", "on each GPU", "GiB", ""), rows)


def _concurrency(plan: Plan) -> str:
    dp, without = plan.machine.dp, plan.requests_without
    gain = f", {plan.requests / without:.1f} times as many" if without and plan.load.requests is None else ""
    key, row = plan.model.index_key_bytes, plan.budget.row_bytes
    return _wrap(
        f"Requests at once: {without * dp:,} without HiSparse, {plan.requests * dp:,} with it{gain}.\n"
        f"In the way of more: {plan.binding}.\n"
        f"At most {(row + key) / key:.1f} times as many tokens fit however small the buffer is, because {key} B of "
        f"indexer key stay on the device for every {row} B row."
    )


def _link(plan: Plan) -> str:
    rows = []
    for hit_rate in HIT_RATES:
        step_s = plan.link_step_s(hit_rate)
        rows.append(
            (
                f"{hit_rate:.0%}",
                f"{plan.token_bytes(hit_rate) / 1e6:.2f}",
                f"{plan.link_tokens_per_s(hit_rate):,.0f}",
                f"{plan.link_tokens_per_s(hit_rate, scattered=True):,.0f}",
                f"{step_s * 1e3:.1f}" + (" (too long)" if step_s > plan.load.step_s else ""),
            )
        )
    table = _table(("hits", "MB a token", "tokens/s", "if scattered", f"ms a step, {plan.requests} a GPU"), rows)
    steps = [hit for hit in HIT_RATES if plan.link_step_s(hit) > plan.load.step_s]
    verdict = (
        f"The link binds at {max(steps):.0%} hits and below: copying alone takes longer than the step of "
        f"{plan.load.step_s * 1e3:g} ms aimed at (--step-ms)."
        if steps
        else f"The link does not bind: copying fits into a step of {plan.load.step_s * 1e3:g} ms (--step-ms)."
    )
    return (
        "What the link to host memory allows, copying alone, whole server "
        f"({plan.link.near / 1e9:g} GB/s a GPU, {plan.link.scattered / 1e9:g} if a request's pages are scattered):\n"
        f"{table}\n{verdict}"
    )


def _command(plan: Plan, model_path: str) -> str:
    budget = plan.budget
    times = budget.config.device_buffer_size / budget.config.top_k
    return (
        f"Buffer: {budget.config.device_buffer_size} rows a request, {times:.2g} times top-k.\n\n"
        f"    {plan.command(model_path)}"
    )


def _assumptions(plan: Plan) -> str:
    return _wrap(
        "Requests are counted at their full length, and no prefix is shared. Weights, KV and pool sizes are computed; "
        "the memory kept back is SGLang's rule, CUDA's share an assumption, the link was measured on one H200, and "
        "how often the buffer hits depends on the model and the text."
    )


def _wrap(text: str) -> str:
    return "\n".join(textwrap.fill(line, WIDTH) for line in text.splitlines())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Columns of text; those that hold numbers to the right."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    numeric = [all(row[column][:1].isdigit() or not row[column] for row in cells[1:]) for column in range(len(head))]
    lines = []
    for row in cells:
        aligned = [
            cell.rjust(width) if number and width else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  " + "  ".join(aligned).rstrip())
    return "\n".join(lines)
