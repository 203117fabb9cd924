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


COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]


def mounted(service: str) -> dict[str, str]:
    """Returns where files of this folder are in a container: path there → path here."""
    found = {}
    for volume in COMPOSE[service]["volumes"]:
        if isinstance(volume, str) and volume.startswith("./observability/"):
            here, there, mode = volume.split(":")
            assert mode == "ro"
            found[there] = here.removeprefix("./observability/")
    return found


def loaded(name: str) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return value


def port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def test_the_collectors_pipelines_are_whole_and_end_where_somebody_listens() -> None:
    collector, tempo = loaded("collector.yaml"), loaded("tempo.yaml")
    service = collector["service"]
    for name, pipeline in service["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(collector[kind]), (name, kind)
        # Room is looked at before anything is kept, and what is kept leaves in batches.
        assert (pipeline["processors"][0], pipeline["processors"][-1]) == ("memory_limiter", "batch")
    used = {each for pipeline in service["pipelines"].values() for each in pipeline["exporters"]}
    assert used == set(collector["exporters"])
    assert set(service["extensions"]) == set(collector["extensions"])
    # What services are told: `LORAPORT_OTLP=http://collector:4317`.
    assert "http://collector:4317" in OPERATIONS.read_text()
    assert port(collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]) == 4317
    host, _, traces = collector["exporters"]["otlp/tempo"]["endpoint"].rpartition(":")
    assert host in COMPOSE
    assert port(tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]) == int(traces)
    assert collector["processors"]["memory_limiter"]["limit_mib"] < int(COMPOSE["collector"]["mem_limit"].rstrip("m"))
    # Without it the page has no exemplars, and panels no way to a trace.
    assert collector["exporters"]["prometheus"]["enable_open_metrics"] is True
    for where in (tempo["storage"]["trace"]["local"]["path"], tempo["storage"]["trace"]["wal"]["path"]):
        assert where.startswith("/var/tempo/")


@pytest.mark.parametrize(
    ("service", "flag"),
    [("collector", "--config"), ("tempo", "-config.file="), ("prometheus", "--config.file=")],
)
def test_programs_are_told_a_file_that_is_mounted(service: str, flag: str) -> None:
    words = COMPOSE[service]["command"]
    at = next(index for index, word in enumerate(words) if word.startswith(flag))
    path = words[at + 1] if words[at] == flag else words[at].removeprefix(flag)
    assert (FOLDER / mounted(service)[path]).is_file()
    if service == "prometheus":
        for rules in loaded("prometheus.yml")["rule_files"]:
            assert mounted(service)[rules] == "alerts.yaml"
        assert "--enable-feature=exemplar-storage" in words


def test_grafana_finds_its_sources_its_dashboards_and_the_way_from_a_panel_to_a_trace() -> None:
    sources = {source["uid"]: source for source in loaded("grafana/datasources.yaml")["datasources"]}
    assert [uid for uid, source in sources.items() if source.get("isDefault")] == ["prometheus"]
    for source in sources.values():
        host, _, number = source["url"].removeprefix("http://").partition(":")
        assert host in COMPOSE
        assert number == {"prometheus": "9090", "tempo": str(loaded("tempo.yaml")["server"]["http_listen_port"])}[host]
    [link] = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert sources[link["datasourceUid"]]["type"] == "tempo"
    assert link["name"] == "trace_id"  # as tests/e2e/test_prometheus.py sees it in an exemplar
    linked = 0
    uids = set()
    for path in sorted((FOLDER / "grafana" / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        uids.add(dashboard["uid"])
        for panel in dashboard["panels"]:
            assert sources[panel["datasource"]["uid"]]["type"] == panel["datasource"]["type"], panel["title"]
            linked += sum(target["exemplar"] for target in panel["targets"])
    assert len(uids) == len(gen_dashboards.DASHBOARDS)
    assert linked
    files = mounted("grafana")
    [provider] = loaded("grafana/dashboards.yaml")["providers"]
    assert files[provider["options"]["path"]] == "grafana/dashboards"
    assert {"grafana/datasources.yaml", "grafana/dashboards.yaml"} <= set(files.values())
    for path in files:
        assert path == provider["options"]["path"] or path.startswith("/etc/grafana/provisioning/")
