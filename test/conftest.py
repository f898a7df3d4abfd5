"""Settings of the whole suite: property tests draw the same examples in every run, and slow machines are no failure;
and how tests are shared out to several workers (`make test`).
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "hisparse",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("hisparse")

HERE = Path(__file__).parent

LONGEST_FIRST = (
    ("engine", ("engine/",)),
    ("pair of servers", ("e2e/test_equality.py", "e2e/test_http.py", "e2e/test_disconnects.py")),
    ("parallel", ("e2e/test_parallel.py",)),
    ("mutation", ("mutation/",)),
    ("needle", ("e2e/test_needle.py",)),
    ("observability", ("e2e/test_observability.py",)),
    ("start-up", ("e2e/test_startup.py",)),
    ("documentation", ("docs/test_server.py",)),
    ("coordinator fuzz", ("unit/test_coordinator_fuzz.py",)),
    ("plan", ("e2e/test_plan.py",)),
)
"""Tests that share servers and so belong to one worker; every other file is a group of its own, behind them."""


def place(path: str) -> tuple[int, str]:
    """Rank and group of a file below `test`."""
    for number, (group, beginnings) in enumerate(LONGEST_FIRST):
        if path.startswith(beginnings):
            return number, group
    return len(LONGEST_FIRST), path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.path.relative_to(HERE).as_posix())[0])  # stable: a file keeps its order


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole groups, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class LoadGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return place(nodeid.split("::")[0].removeprefix("test/"))[1]

    config.option.loadscopereorder = False
    return LoadGroups(config, log)
