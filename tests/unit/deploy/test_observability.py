"""Dashboards, alerts and the run book speak of metrics that services really export, and of each other."""

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml

from scripts import gen_dashboards
from services.shared.metrics import METRICS, OTHER, Metric
from tests.architecture.source import ROOT

FOLDER = ROOT / "deploy" / "observability"
OPERATIONS = ROOT / "docs" / "operations.md"
# What a collector or Prometheus itself puts on every series, and the bucket of a histogram.
GIVEN = {"job", "instance"}
SERIES = {name: metric for metric in METRICS.values() for name in metric.series_names}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yields (where, PromQL) of every query in alerts and dashboards."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for path in sorted((FOLDER / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


ALL = list(queries())


def walk(node: Any) -> Iterator[Any]:
    """Yields every part of a parsed query."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        part = getattr(node, name, None)
        if part is not None:
            yield from walk(part)
    for part in getattr(node, "args", ()):
        yield from walk(part)


def faults(query: str) -> list[str]:
    """Returns what a query says of metrics that is not so."""
    found: list[str] = []
    parts = list(walk(promql.parse(query)))
    selectors = [part for part in parts if isinstance(part, promql.VectorSelector)]
    known = set(GIVEN)
    for selector in selectors:
        metric = SERIES.get(selector.name)
        if metric is None:
            found.append(f"no service exports {selector.name}")
            continue
        known |= set(metric.labels) | ({"le"} if metric.kind == "histogram" else set())
        found += _matcher_faults(metric, selector)
    for part in parts:
        if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            found += [f"no label {name} to aggregate by" for name in set(part.modifier.labels) - known]
    return found if selectors else ["it asks for nothing"]


def _matcher_faults(metric: Metric, selector: Any) -> list[str]:
    found = []
    for matcher in selector.matchers.matchers:
        if matcher.name in GIVEN:
            continue
        values = metric.labels.get(matcher.name)
        if values is None:
            found.append(f"{selector.name} has no label {matcher.name}")
        else:
            asked = matcher.value.split("|")
            found += [f"{matcher.name} is never {value}" for value in asked if value not in {*values, OTHER}]
    return found


@pytest.mark.parametrize(("where", "query"), ALL, ids=[where for where, _ in ALL])
def test_every_query_asks_for_what_is_exported(where: str, query: str) -> None:
    assert faults(query) == []


@pytest.mark.parametrize(
    "query",
    [
        "rate(loraport_router_requests[5m])",
        'loraport_router_requests_total{tenant="acme"}',
        'loraport_router_answered_total{revision="wronk"}',
        "sum by (adapter) (loraport_router_queued)",
        'loraport_router_requests_total{outcome=~"OK|NO_SUCH_REASON"}',
        "1 + 1",
    ],
)
def test_a_query_that_asks_for_what_is_not_is_found(query: str) -> None:
    assert faults(query)


def test_dashboards_are_as_the_script_makes_them() -> None:
    for name in gen_dashboards.DASHBOARDS:
        path = FOLDER / "grafana" / "dashboards" / f"{name}.json"
        assert path.read_text() == gen_dashboards.dashboard(name), "run: python scripts/gen_dashboards.py"


def test_every_alert_has_its_page_in_the_run_book_and_nothing_else_has() -> None:
    named = set(re.findall(r"^### (\w+)$", OPERATIONS.read_text(), re.MULTILINE))
    rules = {rule["alert"] for rule in alerts()}
    assert rules <= named, sorted(rules - named)
    assert {name for name in named if re.fullmatch(r"([A-Z][a-z]+){2,}", name)} == rules
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


def test_the_autoscaler_follows_a_metric_that_is_exported() -> None:
    text = (ROOT / "deploy" / "kubernetes" / "nodes.yaml").read_text()
    asked = set(re.findall(r"loraport_[a-z_]+", text))
    assert asked
    assert asked <= set(SERIES)


def test_commands_of_the_run_book_exist() -> None:
    from typer.main import get_command

    from loraport.cli.main import app

    root = get_command(app)
    for line in re.findall(r"`loraport ([a-z][a-z -]*)", OPERATIONS.read_text()):
        command: Any = root
        for word in line.split():
            if word.startswith("-") or not hasattr(command, "commands"):
                break
            assert word in command.commands, f"no command: loraport {line}"
            command = command.commands[word]


@pytest.mark.parametrize("name", ["collector.yaml", "prometheus.yml", "tempo.yaml", "alerts.yaml"])
def test_configurations_are_yaml_and_agree_on_their_ports(name: str) -> None:
    assert yaml.safe_load((FOLDER / name).read_text())
    collector = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    port = collector["exporters"]["prometheus"]["endpoint"].rpartition(":")[2]
    assert f"collector:{port}" in (FOLDER / "prometheus.yml").read_text()
