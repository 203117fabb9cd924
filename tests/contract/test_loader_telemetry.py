"""Every stage that the tables know has a span and a point in the histogram, under labels that nobody outside chooses."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from services.loader.stages import INTAKE_FINAL, LOAD_FINAL, IntakeState, LoadState
from services.shared.metrics import LOADER_STAGES, LOOKUPS, MOVED, REFUSALS
from tests.loader_rig import Rig, reason
from tests.support.telemetry import Seen, recording


@pytest.fixture
def seen() -> Iterator[Seen]:
    with recording() as seen:
        yield seen


def stages(seen: Seen) -> dict[tuple[str, ...], int]:
    """Returns how many points there are of each (kind, stage, outcome, tier)."""
    found = seen.points(LOADER_STAGES)
    return {tuple(dict(key)[name] for name in ("kind", "stage", "outcome", "tier")): n for key, n in found.items()}


async def test_every_stage_has_both(rig: Rig, seen: Seen) -> None:
    bundle = await rig.admit(seed=201)
    await rig.ensure(bundle)
    await rig.ensure(bundle)  # warm: nothing but its name is looked up
    load = [("load", stage.value) for stage in LoadState if stage not in LOAD_FINAL]
    intake = [("intake", stage.value) for stage in IntakeState if stage not in INTAKE_FINAL]
    intake += [("intake", "RESOLVE"), ("intake", "FETCH")]
    counts = {(kind, stage): count for (kind, stage, *_), count in stages(seen).items()}
    assert counts == dict.fromkeys([*load, *intake], 1) | {("load", "RESOLVE"): 2}
    # An upload begins a trace; nothing began one for the loads.
    assert {span.name for span in seen.spans() if span.name.startswith("loader.intake")} == {
        f"loader.{kind}.{stage.lower()}" for kind, stage in intake
    }
    assert not [span for span in seen.spans() if span.name.startswith("loader.load")]
    assert seen.values(LOOKUPS) == {"HOST hit": 1, "HOST miss": 1, "STORE hit": 1}
    assert seen.values(MOVED) == {"STORE": len(bundle.weights)}


async def test_what_goes_wrong_is_an_outcome(rig: Rig, seen: Seen) -> None:
    bad = rig.registry.register(seed=202)
    assert not (await rig.upload(bad, content=bad.weights[:-1] + b"\x01")).admitted
    spoiled = await rig.admit(seed=203)
    rig.stored_path(spoiled).write_bytes(spoiled.weights[::-1])
    assert await reason(rig.ensure(spoiled)) == "DIGEST_MISMATCH"
    found = stages(seen)
    assert found["intake", "VERIFY", "REFUSED", ""] == 1
    assert found["load", "FETCH", "OK", "STORE"] == found["load", "VERIFY", "DIGEST_MISMATCH", ""] == 1
    assert ("load", "STAGE_HOST", "OK", "") not in found
    assert seen.values(REFUSALS)["DIGEST_MISMATCH"] == 1
    assert "other" not in seen.values(REFUSALS), "a violation that the table of labels lacks"


def test_by_default_nothing_is_recorded_anywhere() -> None:
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)
    assert not isinstance(metrics.get_meter_provider(), MeterProvider)


def test_labels_are_closed_sets(seen: Seen) -> Any:
    from services.shared import telemetry

    for number in range(10_000):
        name = f"tenant-{number}"
        telemetry.count(LOOKUPS, tier=name, result="hit")
        telemetry.observe(LOADER_STAGES, 0.1, kind=name, stage=name, outcome=name, tier=name)
    assert seen.values(LOOKUPS) == {"other hit": 10_000}
    assert len(seen.points(LOADER_STAGES)) == 1
