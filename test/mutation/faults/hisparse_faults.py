"""A plug-in that breaks the data plane in one chosen way, to show that the equality tests notice.

The file named by HISPARSE_FAULT_FILE holds the name of the fault in force; it is read at every step of the first
layer's calls, so one server can be broken in all ways in turn. An empty file is a healthy server.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[..., Any]


def register() -> None:
    import hisparse_kernel as kernel

    for name in ("swap_in", "store_decode", "reset", "seed"):
        setattr(kernel, name, _breakable(name, getattr(kernel, name)))


def _breakable(name: str, healthy: Call) -> Call:
    def call(**arguments: Any) -> Any:
        fault = Path(os.environ["HISPARSE_FAULT_FILE"]).read_text().strip()
        target, broken = FAULTS.get(fault, ("", healthy))
        return broken(healthy, arguments) if target == name else healthy(**arguments)

    return call


def _no_miss_copy(swap_in: Call, arguments: dict[str, Any]) -> Any:
    """Missing rows are mapped, but their bytes never arrive."""
    before = arguments["hot_rows"].clone()
    out = swap_in(**arguments)
    arguments["hot_rows"].copy_(before)
    return out


def _dropped_backup(store_decode: Call, arguments: dict[str, Any]) -> None:
    """A generated row reaches the tail ring but not its host slot."""
    store_decode(**{**arguments, "host_rows": arguments["host_rows"].clone()})


def _stale_region(reset: Call, arguments: dict[str, Any]) -> None:
    """A new request finds the owners of the region's last one."""
    owners, order = arguments["owners"].clone(), arguments["lru_order"].clone()
    reset(**{**arguments, "owners": owners, "lru_order": order})


def _wrong_row(swap_in: Call, arguments: dict[str, Any]) -> Any:
    """Misses read the neighbouring slot."""
    table = arguments["req_to_token"]
    return swap_in(**{**arguments, "req_to_token": (table + 1).clamp_max(arguments["host_rows"].shape[0] - 1)})


def _tail_off_by_one(store_decode: Call, arguments: dict[str, Any]) -> None:
    """A generated row lands one tail row too far."""
    store_decode(**{**arguments, "seq_lens": arguments["seq_lens"] + 1})


def _wrong_seed(seed: Call, arguments: dict[str, Any]) -> None:
    """Seeded rows come from one workspace row too far."""
    seed(**{**arguments, "workspace_starts": arguments["workspace_starts"] + 1})


FAULTS: dict[str, tuple[str, Callable[[Call, dict[str, Any]], Any]]] = {
    "no miss copy": ("swap_in", _no_miss_copy),
    "dropped backup": ("store_decode", _dropped_backup),
    "stale region": ("reset", _stale_region),
    "wrong row": ("swap_in", _wrong_row),
    "tail ring off by one": ("store_decode", _tail_off_by_one),
    "wrong seed": ("seed", _wrong_seed),
}
