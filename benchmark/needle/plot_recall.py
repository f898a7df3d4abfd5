"""Draws what serve_recall.py found: a panel a configuration, a square a context length and depth.

python -m pip install -r benchmark/needle/requirements-plot.txt
python benchmark/needle/plot_recall.py out/needle-recall/recall.json docs/needle-recall.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

PANELS = {"dense": "dense attention", "top-k 256": "top-k 256, HiSparse off", "HiSparse": "top-k 256, HiSparse on"}
COLD = "#b2182b"  # no answer right
WARM = "#1a7f5a"  # all right


def main() -> None:
    cells = json.loads(Path(sys.argv[1]).read_text())
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    scale = plt.matplotlib.colors.LinearSegmentedColormap.from_list("recall", [COLD, "#f4e3b2", WARM])
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.9), sharey=True, layout="constrained")
    image = None
    for axis, (configuration, title) in zip(axes, PANELS.items(), strict=True):
        recall = np.full((len(depths), len(lengths)), np.nan)
        for cell in cells:
            if cell["configuration"] == configuration:
                row, column = depths.index(cell["depth"]), lengths.index(cell["length"])
                recall[row, column] = cell["right"] / cell["questions"]
                label = f"{cell['right']}/{cell['questions']}"
                axis.text(column, row, label, ha="center", va="center", color="white", fontsize=9)
        image = axis.imshow(recall, cmap=scale, vmin=0, vmax=1, aspect="auto")
        axis.set_title(title, fontsize=11)
        axis.set_xticks(range(len(lengths)), [f"{n // 1024}k" for n in lengths])
        axis.set_xlabel("context length, tokens")
        axis.set_xticks(np.arange(-0.5, len(lengths)), minor=True)
        axis.set_yticks(np.arange(-0.5, len(depths)), minor=True)
        axis.grid(which="minor", color="white", linewidth=2)
        axis.tick_params(which="both", length=0)
        axis.spines[:].set_visible(False)
    axes[0].set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes[0].set_ylabel("depth of the fact (0 = start)")
    figure.colorbar(image, ax=axes, label="recall", shrink=0.9)
    figure.suptitle("needle through SGLang on a CPU: right answers / questions", fontsize=12)
    figure.savefig(sys.argv[2], dpi=110)


if __name__ == "__main__":
    main()
