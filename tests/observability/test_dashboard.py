"""The dashboard, the alerts and their pages name only metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from greensched.integrations.opentelemetry import OBSERVED, TIMES
from greensched.integrations.prometheus import METRICS, PoolCollector
from helpers.promql import nodes

ROOT = Path(__file__).parents[2]
HERE = ROOT / "examples/observability"
DASHBOARD = json.loads((HERE / "grafana.json").read_text())
RULES = yaml.safe_load((HERE / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
#: What a Prometheus server adds to each sample.
ADDED = {"instance", "job"}
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}


def labels_of() -> dict[str, set[str]]:
    """Return the labels of every sample of the collector, by name."""
    found = {}
    for family, (_, _, labels) in zip(PoolCollector().describe(), METRICS.values(), strict=True):
        more = {"le"} if family.type == "histogram" else set()
        for suffix in SUFFIXES.get(family.type, [""]):
            found[family.name + suffix] = {"pool", *labels, *more, *ADDED}
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Return every query with its place."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m")
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for variable in DASHBOARD["templating"]["list"][1:]:
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()
        yield variable["name"], f"sum by ({label}) ({selector})"


@pytest.mark.parametrize(("where", "query"), [*queries()])
def test_every_query_names_what_exists(where: str, query: str) -> None:
    """It is valid PromQL over the collector's metrics and labels."""
    known, used = labels_of(), set[str]()
    found = list(nodes(promql.parse(query)))
    for node in found:
        if isinstance(node, promql.VectorSelector):
            assert node.name in known
            used |= known[node.name]
            assert {one.name for one in node.matchers.matchers} <= known[node.name]
    for node in found:
        modifier = getattr(node, "modifier", None)
        matching = getattr(modifier, "matching", modifier)
        assert set(getattr(matching, "labels", ())) <= used


def test_every_metric_is_on_the_dashboard() -> None:
    """Every exported metric has a panel, except those for joins."""
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    hidden = {name for name in METRICS if f"greensched_{name}" not in shown}
    assert hidden == {"pool_info", "device_info"}


def test_panels_do_not_overlap() -> None:
    """Each has its own id and its own place on the grid of 24 columns."""
    taken = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len({*taken}) == len(taken)
    assert max(x for x, _ in taken) == 23
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len({*ids}) == len(ids)


def test_a_variable_that_starts_somewhere_says_what_is_shown() -> None:
    """Grafana's schema (`@grafana/schema` 13.2) asks a `current` for its text and its value."""
    variables = DASHBOARD["templating"]["list"]
    started = [variable["current"] for variable in variables if "current" in variable]
    assert len(started) == len(variables) - 1
    assert all(current.keys() == {"text", "value"} for current in started)


def test_every_metric_has_a_line_in_the_reference() -> None:
    """docs/reference/metrics.md lists the samples' names with their labels."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(greensched_\w+)` \| ([^|]*)\|", page, re.MULTILINE))
    listed = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows.items()}
    exported = {
        re.sub("_(bucket|sum|count)$", "", name): labels - {"pool", "le", *ADDED}
        for name, labels in labels_of().items()
    }
    assert listed == exported


def test_every_instrument_of_opentelemetry_has_a_line_in_the_reference() -> None:
    """The same page lists the instruments, with their units."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    listed = dict(re.findall(r"^\| `([a-z.]+\.[a-z_.]+)` \| `([^`]+)` \|", page, re.MULTILINE))
    units = {name: unit for name, (_, unit, _, _) in OBSERVED.items()}
    assert listed == units | {f"greensched.lease.{part}_time": "s" for part in TIMES}


#: The instruments of OpenTelemetry with what the metrics of alerts report.
SAME = {
    "device_up": "hw.status",
    "pool_fault": "greensched.pool.fault",
    "pool_ready": "greensched.pool.ready",
    "hung_sms": "greensched.sm.hung",
    "oldest_lease_seconds": "greensched.lease.oldest",
    "requests": "greensched.lease.requests",
    "requests_waiting": "greensched.lease.pending_requests",
    "wake_seconds": "greensched.wake.count",
}


def test_every_alert_can_be_written_for_opentelemetry() -> None:
    """What the alerts read has an instrument each."""
    read = {
        node.name
        for rule in RULES
        for node in nodes(promql.parse(rule["expr"]))
        if isinstance(node, promql.VectorSelector)
    }
    names = {re.sub("^greensched_|_(bucket|sum|count|total)$", "", name) for name in read}
    assert names == SAME.keys()
    assert OBSERVED.keys() >= {*SAME.values()}


def test_every_alert_is_in_the_runbook() -> None:
    """docs/how-to/operate.md has a line for each alert, and none for others."""
    page = (ROOT / "docs/how-to/operate.md").read_text()
    assert {*re.findall(r"^\| `(Greensched\w+)`", page, re.MULTILINE)} == {
        rule["alert"] for rule in RULES
    }
