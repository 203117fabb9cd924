"""Every stage that the tables know has a span and a point in the histogram, under labels that nobody outside chooses."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.loader import measure
from services.loader.stages import INTAKE_FINAL, LOAD_FINAL, IntakeState, LoadState
from tests.loader_rig import Rig, reason, running, s3_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with s3_server(folder) as address:
        yield address


@pytest.fixture
async def rig(tmp_path: Path, address: str, folder: Path) -> AsyncIterator[Rig]:
    async with running(tmp_path, address, folder) as rig:
        yield rig


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[InMemorySpanExporter, InMemoryMetricReader]:
    """What the loader records, without the process's own providers."""
    spans, points = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    meter = MeterProvider([points]).get_meter("loraport.loader")
    monkeypatch.setattr(measure, "tracer", provider.get_tracer("loraport.loader"))
    monkeypatch.setattr(measure, "_DURATION", meter.create_histogram(measure.HISTOGRAM, unit="s"))
    return spans, points


def measured(points: InMemoryMetricReader) -> dict[tuple[Any, ...], int]:
    """Returns how many points there are of each (kind, stage, outcome, tier)."""
    data = points.get_metrics_data()
    [metric] = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
    assert (metric.name, metric.unit) == ("loraport.loader.stage.duration", "s")
    keys = ("kind", "stage", "outcome", "tier")
    for point in metric.data.data_points:
        assert set(point.attributes) == set(keys)
        assert 0 <= point.sum < 60
    return {tuple(point.attributes[key] for key in keys): point.count for point in metric.data.data_points}


async def test_every_stage_has_both(rig: Rig, seen: tuple[InMemorySpanExporter, InMemoryMetricReader]) -> None:
    spans, points = seen
    bundle = await rig.admit(seed=201)
    await rig.ensure(bundle)
    await rig.ensure(bundle)  # warm: nothing but its name is looked up
    stages = [
        *(("load", stage.value) for stage in LoadState if stage not in LOAD_FINAL),
        *(("intake", stage.value) for stage in IntakeState if stage not in INTAKE_FINAL),
        ("intake", "RESOLVE"),
        ("intake", "FETCH"),
    ]
    counts = {(kind, stage): count for (kind, stage, *_), count in measured(points).items()}
    assert counts == dict.fromkeys(stages, 1) | {("load", "RESOLVE"): 2}
    assert {span.name for span in spans.get_finished_spans()} == {f"loader.{k}.{s.lower()}" for k, s in stages}


async def test_what_goes_wrong_is_an_outcome(rig: Rig, seen: tuple[Any, InMemoryMetricReader]) -> None:
    bad = rig.registry.register(seed=202)
    assert not (await rig.upload(bad, content=bad.weights[:-1] + b"\x01")).admitted
    spoiled = await rig.admit(seed=203)
    rig.stored_path(spoiled).write_bytes(spoiled.weights[::-1])
    assert await reason(rig.ensure(spoiled)) == "DIGEST_MISMATCH"
    found = measured(seen[1])
    assert found["intake", "VERIFY", "REFUSED", ""] == 1
    assert found["load", "FETCH", "OK", "STORE"] == found["load", "VERIFY", "DIGEST_MISMATCH", ""] == 1
    assert ("load", "STAGE_HOST", "OK", "") not in found


def test_by_default_nothing_is_recorded_anywhere() -> None:
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)
    assert not isinstance(metrics.get_meter_provider(), MeterProvider)
