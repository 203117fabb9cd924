"""What a process shows at its endpoint, and sends to a collector, from its configuration alone."""

import json
import subprocess
import sys
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.shared import metrics
from services.shared.config import ConfigError, from_mapping
from services.shared.telemetry import TelemetryConfig
from tests.architecture.source import ROOT
from tests.support.collector import Collector, collecting

SEEN_S = 0.2
CODE = """
import json, sys, urllib.request
from contextvars import copy_context
from opentelemetry import metrics as otel, trace
from services.shared import metrics, telemetry, tracing
port = telemetry.start("router", telemetry.TelemetryConfig(otlp_endpoint=sys.argv[1], trace_ratio=1.0))
def call():
    span = tracing.enter(min(tracing.ROOTS), {}, request_id="r", trusted=False)
    telemetry.observe(metrics.TTFT, 0.2, start="warm", tenant_class="acme")
    span.end()
copy_context().run(call)
def fetch(accept):
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked) as answer:
        return answer.headers["Content-Type"], answer.read().decode()
page = fetch("text/plain")[1]
open_metrics = [fetch("application/openmetrics-text;version=1.0.0,text/plain;q=0.5") for _ in range(2)]
trace.get_tracer_provider().shutdown(); otel.get_meter_provider().shutdown()
print(json.dumps({"port": port, "told": telemetry.metrics_port(), "page": page, "open_metrics": open_metrics}))
"""


@pytest.fixture(scope="module")
def run() -> tuple[dict[str, Any], Collector]:
    """What a process with one traced request showed at its endpoint, and what it sent to its collector."""
    with collecting() as collector:
        command = [sys.executable, "-c", CODE, collector.address]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout), collector


def test_the_endpoint_and_the_collector_are_told_the_same(run: tuple[dict[str, Any], Collector]) -> None:
    told, collector = run
    assert told["port"] == told["told"] > 0
    line = 'loraport_router_ttft_seconds_count{start="warm",tenant_class="other"} 1.0'
    assert line in told["page"]
    [((service, instance), sent)] = collector.metrics.items()
    assert service == "loraport-router"
    assert instance
    [point] = sent["loraport.router.ttft"].histogram.data_points
    assert (point.count, point.sum, tuple(point.explicit_bounds)) == (1, SEEN_S, metrics.TTFT.buckets)
    span = the_span(collector)
    assert [exemplar.trace_id for exemplar in point.exemplars] == [span.trace_id]


def test_who_accepts_openmetrics_is_shown_the_trace_in_its_bucket(run: tuple[dict[str, Any], Collector]) -> None:
    told, collector = run
    assert "trace_id" not in told["page"]
    # Whoever fetches later is shown it as well.
    for kind, page in told["open_metrics"]:
        assert kind.startswith("application/openmetrics-text")
        families = {family.name: family for family in text_string_to_metric_families(page)}
        samples = families["loraport_router_ttft_seconds"].samples
        [(le, exemplar)] = [(one.labels["le"], one.exemplar) for one in samples if one.exemplar is not None]
        assert float(le) == min(bound for bound in metrics.TTFT.buckets if bound >= SEEN_S)
        span = the_span(collector)
        assert exemplar.labels == {"trace_id": span.trace_id.hex(), "span_id": span.span_id.hex()}
        assert exemplar.value == SEEN_S


def the_span(collector: Collector) -> Any:
    [(_, span)] = collector.spans
    return span


@pytest.mark.parametrize(
    "wrong",
    [{"trace_ratio": 1.5}, {"trace_ratio": -0.1}, {"traces_kept": 0}, {"metrics_listen": "nowhere"}, {"labels": 1}],
)
def test_what_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        from_mapping(TelemetryConfig, wrong, where="telemetry")
