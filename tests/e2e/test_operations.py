"""What an operator sees of a running stack: one trace per request over all services, metrics, checks, reports."""

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from services.shared.metrics import METRICS
from tests.e2e.harness import Stack, publish, wait_until
from tests.support.collector import Collector

# Of opentelemetry.proto.metrics.v1.AggregationTemporality.
CUMULATIVE = 2
CANARY = "zebra-canary-7391"


@pytest.fixture(scope="module")
def asked(stack: Stack, world_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The ids of a cold request and a warm one, and the revision that answered both."""
    # Weights that nobody else has: the loader keeps the same ones once, so others' would not be cold.
    bundle = tmp_path_factory.mktemp("traced") / "bundle"
    shutil.copytree(world_dir / "bundles" / "plain_r64", bundle)
    weights = bundle / "adapter_model.safetensors"
    save_file({name: 0.5 * tensor for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    publish(stack, bundle, "acme", "traced")
    ask = ("generate", f"{CANARY} a b c", "--tenant", "acme", "--adapter", "traced", "--max-tokens", "6")
    cold, warm = stack.ok(*ask), stack.ok(*ask)
    return {"cold": cold["request_id"], "warm": warm["request_id"], "revision_id": cold["revision_id"]}


def test_a_cold_request_is_one_trace_over_all_four_services(stack: Stack, asked: dict[str, str]) -> None:
    found = stack.ok("trace", asked["cold"])
    spans = {span["name"]: span for span in found["spans"]}
    assert {span["service"] for span in found["spans"]} == {"router", "executor", "loader", "registry"}
    for name in ("router.admit", "router.queue", "router.attempt", "executor.load", "loader.load.fetch"):
        assert name in spans, sorted(spans)
    # One tree: every span but the first has its parent in it.
    ids = {span["span_id"] for span in found["spans"]}
    roots = [span for span in found["spans"] if span["parent_span_id"] not in ids]
    assert [span["name"] for span in roots] == ["router.InferenceService.Generate"]
    facts = roots[0]["attributes"]
    assert facts["revision_id"] == asked["revision_id"]
    assert (facts["start"], facts["outcome"], facts["tokens"]) == ("cold", "OK", "6")
    assert float(facts["load_ms"]) > 0
    execute = spans["executor.ExecutorService.Execute"]["attributes"]
    assert int(execute["batch_rows"]) >= 1
    assert execute["distinct_adapters"] == "1"
    assert execute["kernel_path"]
    assert {"queue_ms", "cached_tokens", "finish_reason"} <= set(execute)
    assert spans["loader.load.fetch"]["attributes"]["tier"] == "STORE"
    # By its trace it is found as well, and in a screen for a person.
    assert stack.ok("trace", found["trace_id"])["spans"] == found["spans"]
    text = stack.cli("trace", asked["cold"]).out
    assert "executor.load" in text
    assert len(text.splitlines()) <= 50


def test_a_warm_request_asks_neither_loader_nor_registry(stack: Stack, asked: dict[str, str]) -> None:
    found = stack.ok("trace", asked["warm"])
    assert {span["service"] for span in found["spans"]} == {"router", "executor"}
    assert stack.cli("trace", "nobody-asked-this").code == 1


def test_no_prompt_and_no_key_is_told(stack: Stack, asked: dict[str, str]) -> None:
    secret = (stack.data / "keys" / "acme.key").read_text().strip()
    told = [json.dumps(stack.ok("trace", asked[name])) for name in ("cold", "warm")]
    told += [stack.cli("trace", asked["cold"]).out, json.dumps(stack.ok("top")), *_pages(stack).values()]
    told += [path.read_text() for path in (stack.data / "logs").glob("*.log")]
    for text in told:
        assert CANARY not in text
        assert secret not in text
        assert secret.rpartition("_")[2] not in text
    for name, page in _pages(stack).items():
        for word in ("acme", "globex", "traced", "sha256"):
            assert f'"{word}' not in page, f"{name} exports {word}"


def test_every_service_exports_its_metrics_and_nothing_else_of_ours(stack: Stack, asked: dict[str, str]) -> None:
    # An executor counts its steps when it is sampled, which may be after their request has been answered.
    counted = "loraport_executor_step_duration_seconds_bucket"
    wait_until(lambda: counted in _pages(stack)["tiny-0"], within_s=120, what="a step in the executor's metrics")
    pages = _pages(stack)
    for service, page in pages.items():
        kind = "executor" if service not in ("router", "registry", "loader") else service
        shown = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE loraport_")}
        known = {metric.prometheus for metric in METRICS.values() if kind in metric.services}
        assert shown <= known, f"{service} exports what the table lacks"
        sampled = {
            line.partition("{")[0].partition(" ")[0] for line in page.splitlines() if line.startswith("loraport_")
        }
        series = {name for metric in METRICS.values() if kind in metric.services for name in metric.series_names}
        assert sampled <= series
        # Refusals, drains and the like happen in their own tests; what always happens has happened here.
        always = {m.prometheus for m in METRICS.values() if kind in m.services and m.kind == "gauge"}
        assert always <= sampled, sorted(always - sampled)
    router, executor = pages["router"], pages["tiny-0"]
    assert 'loraport_router_answered_total{revision="right"}' in router
    assert 'loraport_router_answered_total{revision="wrong"}' not in router
    for name in ("router_ttft", "router_tpot", "router_queue_residence", "rpc_duration", "loop_lag"):
        assert f"loraport_{name}_seconds_bucket" in router
    for name in ("executor_step_duration_seconds", "executor_step_rows", "adapter_load_duration_seconds"):
        assert f"loraport_{name}_bucket" in executor
    assert 'loraport_adapter_lookups_total{result="miss",tier="DEVICE"}' in executor


def test_a_collector_is_sent_what_every_service_shows_and_whole_traces(
    stack: Stack, asked: dict[str, str], collector: Collector
) -> None:
    services = {f"loraport-{name}" for name in ("router", "executor", "loader", "registry")}
    wait_until(lambda: {service for service, _ in collector.metrics} >= services, within_s=120, what="all metrics")
    for (service, _), sent in list(collector.metrics.items()):
        known = {m.name: m for m in METRICS.values() if service.removeprefix("loraport-") in m.services}
        assert set(sent) <= set(known), service
        # By name, unit and kind a collector makes the names that dashboards ask for: `_seconds`, `_bytes`, `_total`.
        for name, metric in sent.items():
            assert metric.unit == known[name].unit, name
            made = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}[known[name].kind]
            assert metric.WhichOneof("data") == made, name
            assert made != "sum" or (metric.sum.is_monotonic and metric.sum.aggregation_temporality == CUMULATIVE)
    found = stack.ok("trace", asked["cold"])
    trace = bytes.fromhex(found["trace_id"])

    def spans() -> dict[bytes, tuple[str, Any]]:
        return {span.span_id: (service, span) for service, span in list(collector.spans) if span.trace_id == trace}

    wait_until(lambda: len(spans()) >= len(found["spans"]), within_s=120, what="the whole trace")
    sent = spans()
    assert {service for service, _ in sent.values()} == services
    assert sorted(span.name for _, span in sent.values()) == sorted(span["name"] for span in found["spans"])
    roots = [span for _, span in sent.values() if span.parent_span_id not in sent]
    assert [span.name for span in roots] == ["router.InferenceService.Generate"]

    def linked() -> bool:
        """What leads from a panel to a trace."""
        return any(("loraport.router.ttft", span.trace_id) in collector.exemplars for _, span in list(collector.spans))

    wait_until(linked, within_s=120, what="an exemplar whose trace is there")
    secret = (stack.data / "keys" / "acme.key").read_text().strip()
    told = str([metrics for metrics in collector.metrics.values()]) + str([span for _, span in collector.spans])
    assert CANARY not in told
    assert secret not in told


def test_doctor_finds_a_stack_well_and_says_what_is_not(stack: Stack) -> None:
    found = stack.ok("doctor")
    checks = {(one["process"], one["check"]): one for one in found["findings"]}
    assert found["bad_count"] == 0, found
    for key in (("loader", "store"), ("registry", "database"), ("router", "notice board"), ("fleet", "versions")):
        assert checks[key]["state"] == "good", checks[key]
    assert {check for process, check in checks if process == "loader"} >= {
        "certificate",
        "clock",
        "checkpoint",
        "spool",
    }


def test_top_and_the_report_of_cost(stack: Stack, asked: dict[str, str]) -> None:
    found = stack.ok("top")
    assert found["errors"] == {}
    assert [row["state"] for row in found["executors"]] == ["serving"]
    assert any(row["adapter"] == "acme/traced" for row in found["residency"])
    assert any(row["tenant"] == "acme" and row["counter_ms"] > 0 for row in found["queues"])
    text = stack.cli("top", "--once").out
    # The screen has room for the first rows only, and what other tests loaded is on it too.
    assert any(f"{row['adapter']} " in text for row in found["residency"])
    cost = stack.ok("report", "cost")
    assert cost["answered_wrong_count"] == 0
    assert cost["answered_right_count"] >= cost["accepted_count"] + cost["too_slow_count"] >= 2
    assert cost["device_s"] > 0
    assert cost["adapter_moved_bytes"] > 0
    assert cost["one_model_each"]["device_s_at_least"] >= cost["device_s"]
    assert "per accepted request" in stack.cli("report", "cost").out or not cost["accepted_count"]


def test_the_report_of_capacity(stack: Stack, asked: dict[str, str]) -> None:
    found = stack.ok("report", "capacity")
    (base,) = found["bases"]
    (executor,) = found["executors"]
    assert base["fits"]
    assert base["active_count"] == executor["working_set_count"] >= 1
    assert 0 < base["active_bytes"] == executor["working_set_bytes"]
    assert executor["headroom_bytes"] == executor["pool_bytes"] - executor["working_set_bytes"]
    assert "fits" in stack.cli("report", "capacity").out


def _pages(stack: Stack) -> dict[str, str]:
    """Returns every service's Prometheus page, from its endpoint."""
    endpoints = json.loads((stack.data / "endpoints.json").read_bytes())["metrics"]
    pages = {}
    for name, url in endpoints.items():
        with urllib.request.urlopen(url, timeout=60) as answer:
            pages[name] = answer.read().decode()
    return pages
