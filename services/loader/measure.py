"""Every stage of a load and of an intake is a span and a point of one histogram, whatever becomes of it.

The labels come from tables, never from a caller: kind (`load`, `intake`), stage (`services.loader.stages`), tier, and
outcome (OK, REFUSED, SPOILED, CANCELLED, or a reason of `services.shared.errors`).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from services.loader.loading import SpoiledCopy
from services.shared import metrics, telemetry, tracing
from services.shared.clock import Clock
from services.shared.errors import LoraportError


@dataclass(slots=True)
class Stage:
    """What the stage says of itself. `tier` is where bytes came from, STORE or DISK; empty where none did.

    `took_ms` is there once the stage has ended.
    """

    outcome: str = "OK"
    tier: str = ""
    size_bytes: int = 0
    took_ms: float = 0.0


@contextmanager
def measured(kind: Literal["load", "intake"], stage: str, clock: Clock) -> Iterator[Stage]:
    """Measures what happens inside. What is raised there goes on its way."""
    found, started = Stage(), clock.monotonic()
    with tracing.part(f"loader.{kind}.{stage.lower()}") as span:
        try:
            yield found
        except BaseException as error:
            found.outcome = _outcome(error)
            raise
        finally:
            took_s = clock.monotonic() - started
            found.took_ms = took_s * 1000
            span.set_attributes({"outcome": found.outcome, "tier": found.tier, "size_bytes": found.size_bytes})
            telemetry.observe(
                metrics.LOADER_STAGES, took_s, kind=kind, stage=stage, outcome=found.outcome, tier=found.tier
            )


def looked(tier: Literal["HOST", "DISK", "STORE"], *, hit: bool) -> bool:
    """Counts a look for bytes in a tier, and returns whether it found them."""
    telemetry.count(metrics.LOOKUPS, tier=tier, result="hit" if hit else "miss")
    return hit


def fetched(stage: Stage, tier: str, size_bytes: int, *, has_disk: bool) -> None:
    """Notes and counts bytes that a stage fetched into memory from `tier`, STORE or DISK."""
    stage.tier, stage.size_bytes = tier, size_bytes
    if has_disk:
        looked("DISK", hit=tier == "DISK")
    if tier == "STORE":
        looked("STORE", hit=True)
    telemetry.count(metrics.MOVED, size_bytes, tier=tier)


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
