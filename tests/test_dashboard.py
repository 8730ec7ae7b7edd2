"""The Grafana dashboard: each of its queries is PromQL, and asks for metrics and labels that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.scraped import scraped

DASHBOARD = json.loads((Path(__file__).parent.parent / "dashboards" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
# Prometheus adds these to what it scrapes.
OF_PROMETHEUS = {"job", "instance"}
TITLES = [panel["title"] for panel in PANELS]


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Of each name in a live /metrics, as it is written there."""
    found: dict[str, set[str]] = {}
    for line in scraped().splitlines():
        if not line.startswith("#"):
            name, written = re.match(r"([\w:]+)(?:{(.*)})? ", line).groups()  # type: ignore[union-attr]
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', written or ""))
    return found


def parsed(query: str) -> promql_parser.Expr:
    """Variables are texts, but for the one that Grafana has for ranges."""
    return promql_parser.parse(query.replace("$__rate_interval", "5m"))


def nodes(expression: promql_parser.Expr) -> Iterator[Any]:
    found: list[Any] = []
    promql_parser.walk(expression, found.append)
    return iter(found)


def selectors(expression: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    """What is asked of Prometheus."""
    return [node for node in nodes(expression) if isinstance(node, promql_parser.VectorSelector)]


def queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_every_query_asks_for_metrics_and_labels_that_there_are(
    panel: dict[str, Any], labels: dict[str, set[str]]
) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        expression = parsed(target["expr"])
        found = selectors(expression)
        assert found, target["expr"]
        for selector in found:
            assert selector.name in labels, selector.name
            assert {one.name for one in selector.matchers.matchers} <= labels[selector.name] | OF_PROMETHEUS
        kept = set.union(*(labels[selector.name or ""] for selector in found)) | OF_PROMETHEUS
        for node in nodes(expression):
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                for selector in selectors(node.expr):
                    assert set(node.modifier.labels) <= labels[selector.name or ""] | OF_PROMETHEUS, target["expr"]
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, target["legendFormat"]


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_counters_are_asked_for_rates_and_gauges_for_values(panel: dict[str, Any]) -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(scraped())}
    for query in queries(panel):
        expression = parsed(query)
        in_ranges = {
            node.vector_selector.name for node in nodes(expression) if isinstance(node, promql_parser.MatrixSelector)
        }
        for selector in selectors(expression):
            name = selector.name or ""
            family = re.sub(r"_(total|bucket|sum|count)$", "", name)
            kind = kinds.get(name) or kinds[family]
            assert (kind in ("counter", "histogram")) == (name in in_ranges), name


def test_it_can_be_imported() -> None:
    assert DASHBOARD["title"] == DASHBOARD["uid"] == "bei"
    assert "id" not in DASHBOARD  # Grafana gives one
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert VARIABLES["datasource"]["type"] == "datasource"
    for panel in PANELS:
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    taken = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in taken
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "two panels lie over each other"
    assert max(x for x, _ in cells) < 24


def test_every_variable_is_used_and_there() -> None:
    used = {name for panel in PANELS for query in queries(panel) for name in re.findall(r"\$(\w+)", query)}
    assert used - {"__rate_interval"} == set(VARIABLES) - {"datasource"}


def test_the_values_of_variables_are_labels_that_there_are(labels: dict[str, set[str]]) -> None:
    for variable in VARIABLES.values():
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match
            (selector,) = selectors(parsed(match[1]))
            assert match[2] in labels[selector.name or ""] | OF_PROMETHEUS


def test_every_metric_of_ours_but_those_of_tei_is_shown() -> None:
    shown = {
        selector.name or "" for panel in PANELS for query in queries(panel) for selector in selectors(parsed(query))
    }
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    ours = {name for name in re.findall(r"^# TYPE (bei_\w+) ", scraped(), re.M)}
    assert ours - shown == set()
