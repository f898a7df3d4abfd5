"""The plot of bench_concurrency.py: tokens a second against requests sent, a line a server and hit rate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {"off": "without HiSparse", "builtin": "SGLang's own", "ours": "ours"}
COLORS = {"off": "0.3", "builtin": "tab:orange", "ours": "tab:blue"}
STYLES = ("-", "--", ":")


def plot(results: dict[str, Any], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, label in LABELS.items():
        rows = results.get(name, {}).get("levels", [])
        for style, hits in zip(STYLES, dict.fromkeys(row["hits"] for row in rows), strict=False):
            line = [(row["level"], row["tokens_per_s"]) for row in rows if row["hits"] == hits]
            text = label if name == "off" else f"{label}, {hits:g} % hits"
            axis.plot(*zip(*line, strict=True), style, marker="o", markersize=4, color=COLORS[name], label=text)
    axis.set(xscale="log", yscale="log", xlabel="requests sent", ylabel="decode tokens/s")
    ticks = sorted({row["level"] for name in LABELS for row in results.get(name, {}).get("levels", [])})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
