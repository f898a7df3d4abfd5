"""The Grafana dashboard: its structure by Grafana's published schema, its queries by a PromQL parser, its words by the
metrics page. What a scrape of a running server has of it is tested in test/e2e/test_observability.py."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from hisparse.plugin.metrics import COUNTERS, GAUGES, PREFIX, SWAP_IN_SECONDS

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "hisparse.json").read_text())
NAMES = [PREFIX + metric.name for metric in (*COUNTERS, *GAUGES)] + [PREFIX + SWAP_IN_SECONDS]
register_default_plugins()


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Places where `theirs` lacks what `ours` says."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from lost(value, theirs[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(a, b, f"{path}/{place}")
    elif ours != theirs:
        yield path


def understood(dashboard: dict[str, Any]) -> Any:
    """The dashboard after a way through Grafana's own types, which drop what they do not know."""
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def test_grafanas_types_know_every_key() -> None:
    assert list(lost(DASHBOARD, understood(DASHBOARD))) == []


def test_a_wrong_key_would_be_noticed() -> None:
    wrong = json.loads(json.dumps(DASHBOARD))
    wrong["panels"][4]["fieldConfig"]["defaults"]["custom"]["drawstyle"] = "line"
    wrong["panels"][0]["gridpos"] = {}
    assert list(lost(wrong, understood(wrong))) == [
        "/panels/0/gridpos",
        "/panels/4/fieldConfig/defaults/custom/drawstyle",
    ]


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_panels(panel: dict[str, Any]) -> None:
    assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", "1m")
        for name in ("model", "tp_rank"):
            assert f'=~"${name}"' in expression, "a panel that the variables do not filter"
        promql_parser.parse(expression)
        for name in re.findall(PREFIX + r"\w+", expression):
            assert name in NAMES or re.sub("_(bucket|sum|count)$", "", name) in NAMES, name
            counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert counter == bool(re.search(rf"(rate|increase)\({name}\{{", expression)), f"{name}: rate of a counter"


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in itertools.combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_every_metric_is_drawn_and_explained() -> None:
    drawn, page = json.dumps(DASHBOARD), (DOCS / "metrics.md").read_text()
    for name in NAMES:
        assert name in drawn, f"{name} is in no panel"
        assert f"`{name}`" in page, f"docs/metrics.md does not explain {name}"
    for name in re.findall(rf"`({PREFIX}\w+)`", page):
        assert name in NAMES, f"docs/metrics.md explains {name}, which is no metric"


def test_names_and_help_follow_prometheus_conventions() -> None:
    """https://prometheus.io/docs/practices/naming: counters end in _total, units are base units and come last."""
    for metric in COUNTERS:
        assert re.fullmatch(r"[a-z_]+_total", metric.name)
    for metric in GAUGES:
        assert re.fullmatch(r"[a-z_]+", metric.name) and not metric.name.endswith("_total")
    for metric in (*COUNTERS, *GAUGES):
        assert metric.help.endswith(".") and len(metric.help) < 120
