"""Every stage of a load and of an intake is a span and a point of one histogram, whatever becomes of it.

The labels come from tables, never from a caller: kind (`load`, `intake`), stage (`services.loader.stages`), tier, and
outcome (OK, REFUSED, SPOILED, CANCELLED, or a reason of `services.shared.errors`).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from opentelemetry import metrics, trace

from services.loader.loading import SpoiledCopy
from services.shared.clock import Clock
from services.shared.errors import LoraportError

HISTOGRAM = "loraport.loader.stage.duration"

tracer = trace.get_tracer("loraport.loader")
_DURATION = metrics.get_meter("loraport.loader").create_histogram(
    HISTOGRAM,
    unit="s",
    description="How long a stage of a load or of an intake took.",
    explicit_bucket_boundaries_advisory=[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60],
)


@dataclass(slots=True)
class Stage:
    """What the stage says of itself. `tier` is where bytes came from, STORE or DISK; empty where none did."""

    outcome: str = "OK"
    tier: str = ""


@contextmanager
def measured(kind: Literal["load", "intake"], stage: str, clock: Clock) -> Iterator[Stage]:
    """Measures what happens inside. What is raised there goes on its way."""
    found, started = Stage(), clock.monotonic()
    with tracer.start_as_current_span(f"loader.{kind}.{stage.lower()}", record_exception=False) as span:
        try:
            yield found
        except BaseException as error:
            found.outcome = _outcome(error)
            raise
        finally:
            span.set_attributes({"outcome": found.outcome, "tier": found.tier})
            labels = {"kind": kind, "stage": stage, "outcome": found.outcome, "tier": found.tier}
            _DURATION.record(clock.monotonic() - started, labels)


def _outcome(error: BaseException) -> str:
    match error:
        case LoraportError():
            return error.reason
        case SpoiledCopy():
            return "SPOILED"
        case asyncio.CancelledError():
            return "CANCELLED"
        case _:
            return "INTERNAL"
