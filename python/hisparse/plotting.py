"""matplotlib, where it is installed."""

from __future__ import annotations

from typing import Any

from hisparse.config import HiSparseError


def require_matplotlib() -> Any:
    """`matplotlib.pyplot`, drawing into files. Raises `HiSparseError` if it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise HiSparseError(
            "--plot needs matplotlib, which is not installed: pip install 'sglang-hisparse[plot]'."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
