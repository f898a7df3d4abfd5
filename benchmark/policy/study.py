"""The policy study of docs/policy-study.md: how far is LRU from the optimum, and what would come nearer?

    python benchmark/policy/study.py --out out/policy-study

Reads needle's recorded traces, makes the synthetic ones, replays all of them and writes tables (study.md), figures
(study.json) and pictures. Needs libcachesim, matplotlib and tqdm (requirements/dev*.txt). Ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hisparse.plotting import require_matplotlib
from hisparse.simulator.patterns import PATTERNS, make_trace
from hisparse.simulator.plot import plot
from hisparse.simulator.replay import MISS
from hisparse.simulator.simulate import Outcome, gap_closed, regions_of, simulate
from hisparse.trace_format import Trace, read_trace

NEEDLE = Path(__file__).parents[1] / "needle/traces"
WORKLOADS = ("one_fact", "four_facts", "conversation", "free_text")
TIMES_TOP_K = (1, 1.5, 2, 3, 4)
TIMES_IN_TABLES = (1, 2, 4)
OURS = ("lru", "fifo", "random", "lfu", "aging:4", "aging:16", "once:4", "once:16", "once:1000", "lru2")
THEIRS = ("s3fifo", "sieve", "slru", "arc", "lirs", "wtinylfu")
SHOWN = ("lru", "fifo", "lfu", "aging:16", "once:16", "belady")
"""Policies in the pictures."""

LAYER_STEP = 64
"""Rows by which a layer's share of the memory may differ."""


def traces() -> dict[str, Trace]:
    made = {name: read_trace(NEEDLE / f"{name}.npz") for name in WORKLOADS}
    for name in PATTERNS:
        made[name] = make_trace(name, top_k=256, prompt_len=8192, steps=300, requests=2, seed=0)
    return made


def replay_all(trace: Trace, name: str) -> list[Outcome]:
    regions = regions_of(trace)
    runs = [*product(TIMES_TOP_K, (*OURS, "belady")), *product(TIMES_IN_TABLES, THEIRS)]
    return [
        simulate(trace, regions, buffer=round(times * trace.top_k), policy=policy)
        for times, policy in tqdm(runs, desc=name, leave=False)
    ]


def gap_table(outcomes: dict[str, list[Outcome]], names: tuple[str, ...], times: float) -> str:
    """Hit rates of LRU and the optimum, and how much of the gap each policy closes, in percent."""
    policies = [*(policy for policy in OURS if policy != "lru"), *THEIRS]
    lines = ["| trace | LRU | optimum | " + " | ".join(policies) + " |", "|" + "---|" * (3 + len(policies))]
    for name in names:
        here = {o.policy: o for o in outcomes[name] if o.buffer == round(times * 256)}
        gaps = [gap_closed(here[policy], here.values()) for policy in policies]
        cells = [f"{here['lru'].hit_rate:.1%}", f"{here['belady'].hit_rate:.1%}"]
        cells += ["" if gap is None else f"{gap * 100:.0f}" for gap in gaps]
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def anatomy(trace: Trace) -> dict[str, float]:
    """Of LRU's misses at twice top-k, in percent: positions the region never held before; positions generated in
    decode, which were on the device in the tail ring; by layer, rows missed a selection."""
    regions = regions_of(trace)
    outcome = simulate(trace, regions, buffer=2 * trace.top_k, policy="lru")
    first = generated = 0
    for region in regions:
        tail_start = int(trace.seq_len[region.rows[0]]) - 1
        seen = set(region.seeds.tolist())
        for number, step in enumerate(region.steps):
            new = set(step.wanted.tolist()) - seen
            seen |= new
            if region.seeded or number > 0:
                first += len(new)
                generated += sum(position >= tail_start for position in new)
    result = {"first time": 100 * first / outcome.misses, "generated, first time": 100 * generated / outcome.misses}
    for layer in np.unique(trace.layer):
        rows = outcome.counted & (trace.layer == layer)
        result[f"layer {layer}"] = float(outcome.counts[rows, MISS].mean())
    return result


# ---- per-layer sizes at equal total memory


def miss_curves(trace: Trace) -> tuple[list[int], np.ndarray]:
    """Buffer sizes, and LRU's misses [layers, sizes]."""
    regions = regions_of(trace)
    sizes = list(range(trace.top_k, 4 * trace.top_k + 1, LAYER_STEP))
    layers = np.unique(trace.layer)
    curves = np.zeros((len(layers), len(sizes)))
    for column, size in enumerate(sizes):
        outcome = simulate(trace, regions, buffer=size, policy="lru")
        curves[:, column] = [outcome.counts[trace.layer == layer, MISS].sum() for layer in layers]
    return sizes, curves


def best_sizes(curves: np.ndarray, total: int) -> tuple[int, ...]:
    """Columns, one a layer, that add up to `total` and miss least; by trying all."""
    layers, sizes = curves.shape
    choices = (choice for choice in product(range(sizes), repeat=layers) if sum(choice) == total)
    return min(choices, key=lambda choice: sum(curves[layer, column] for layer, column in enumerate(choice)))


def layer_sizes(all_curves: dict[str, tuple[list[int], np.ndarray]]) -> list[dict[str, Any]]:
    """Each workload with equal sizes of twice top-k, with sizes chosen on the other three, and chosen on itself."""
    results = []
    for name, (sizes, curves) in all_curves.items():
        layers, equal = len(curves), sizes.index(512)
        others = sum(other / other[:, equal].sum() for key, (_, other) in all_curves.items() if key != name)
        line: dict[str, Any] = {"trace": name, "equal": float(curves[:, equal].sum())}
        for kind, choice in (
            ("from the others", best_sizes(np.asarray(others), layers * equal)),
            ("from itself", best_sizes(curves, layers * equal)),
        ):
            missed = sum(curves[layer, column] for layer, column in enumerate(choice))
            line[kind] = {"sizes": [sizes[column] for column in choice], "saved": 1 - missed / line["equal"]}
        results.append(line)
    return results


def plot_layers(all_curves: dict[str, tuple[list[int], np.ndarray]], path: Path) -> None:
    pyplot = require_matplotlib()
    figure, panels = pyplot.subplots(1, len(all_curves), figsize=(3.6 * len(all_curves), 3.2), layout="constrained")
    for axes, (name, (sizes, curves)) in zip(panels, all_curves.items(), strict=True):
        for layer, curve in enumerate(curves):
            axes.plot(sizes, curve / curve[0], label=f"layer {layer}")
        axes.set(title=name.replace("_", " "), xlabel="LRU rows of this layer", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("misses, relative to top-k rows")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/policy-study"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    everything = traces()
    outcomes = {name: replay_all(trace, name) for name, trace in tqdm(everything.items())}
    text = []
    for times in TIMES_IN_TABLES:
        text += [f"## Buffer {times}x top-k", gap_table(outcomes, WORKLOADS, times)]
        text += [gap_table(outcomes, tuple(PATTERNS), times)]
    anatomies = {name: anatomy(trace) for name, trace in everything.items()}
    text += ["## Anatomy", "```", *(f"{name}: {parts}" for name, parts in anatomies.items()), "```"]
    curves = {name: miss_curves(everything[name]) for name in WORKLOADS}
    by_layer = layer_sizes(curves)
    text += ["## Layers", "```", *(json.dumps(line) for line in by_layer), "```"]
    (out / "study.md").write_text("\n\n".join(text) + "\n")
    figures = [
        {"trace": name, "policy": o.policy, "buffer": o.buffer, "hit_rate": o.hit_rate, "missed": o.misses_a_selection}
        for name, some in outcomes.items()
        for o in some
    ]
    (out / "study.json").write_text(
        json.dumps({"outcomes": figures, "anatomy": anatomies, "layers": by_layer}, indent=1) + "\n"
    )
    for file, names in (("policy-needle.png", WORKLOADS), ("policy-patterns.png", tuple(PATTERNS))):
        shown = [(name.replace("_", " "), [o for o in outcomes[name] if o.policy in SHOWN]) for name in names]
        plot(shown, out / file)
    plot_layers(curves, out / "policy-layers.png")
    print("\n\n".join(text))


if __name__ == "__main__":
    main()
