"""Hit rate against buffer size, a panel a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hisparse.config import HiSparseError
from hisparse.plotting import require_matplotlib
from hisparse.simulator.simulate import Outcome

STYLE: dict[str, dict[str, Any]] = {
    "lru": {"color": "black", "linewidth": 2},
    "belady": {"color": "gray", "linestyle": "--"},
}


def plot(traces: Sequence[tuple[str, Sequence[Outcome]]], path: Path) -> None:
    """Write a picture. Raises `HiSparseError` if the file cannot be written or its kind is unknown."""
    pyplot = require_matplotlib()
    columns = min(4, len(traces))
    lines = -(-len(traces) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(3.6 * columns, 3.2 * lines), squeeze=False, sharey=True, layout="constrained"
    )
    for axes in panels.flat[len(traces) :]:
        axes.axis("off")
    for axes, (name, outcomes) in zip(panels.flat, traces, strict=False):
        for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
            mine = sorted((o.buffer, o.hit_rate * 100) for o in outcomes if o.policy == policy)
            axes.plot(*zip(*mine, strict=True), marker="o", markersize=3, label=policy, **STYLE.get(policy, {}))
        axes.set(title=name, xlabel="LRU rows")
        axes.grid(alpha=0.3)
    for line in panels:
        line[0].set_ylabel("hits, %")
    panels.flat[0].legend(fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise HiSparseError(f"--plot {path} cannot be written: {error}.") from None
    finally:
        pyplot.close(figure)
