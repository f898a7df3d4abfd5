"""Settings of the whole suite: property tests draw the same examples in every run, and slow machines are no failure;
and how tests are shared out to several workers (`make test`).
"""

from pathlib import Path

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
    ("mutation", ("mutation/",)),
    ("needle", ("e2e/test_needle.py",)),
    ("observability", ("e2e/test_observability.py",)),
    ("start-up", ("e2e/test_startup.py",)),
    ("coordinator fuzz", ("unit/test_coordinator_fuzz.py",)),
    ("plan", ("e2e/test_plan.py",)),
)
"""Groups of tests that share servers, for --dist loadgroup; every other file is a group of its own, behind them."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[int, str]:
        path = item.path.relative_to(HERE).as_posix()
        for number, (group, beginnings) in enumerate(LONGEST_FIRST):
            if path.startswith(beginnings):
                return number, group
        return len(LONGEST_FIRST), path

    for item in items:
        item.add_marker(pytest.mark.xdist_group(place(item)[1]))
    items.sort(key=lambda item: place(item)[0])  # stable: the order within a file stays
