"""What the executor tells of itself: gauges and sums from the engine's books, and every step and load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.executor.engine.state import EngineState
from services.executor.ports import Stage
from services.executor.step_meter import StepNote
from services.shared import metrics, telemetry


def sample(state: EngineState, steps: Iterable[StepNote], *, base_bytes: int) -> None:
    """Sets the gauges and sums to what the engine's books say, and counts steps that have run."""
    for step in steps:
        telemetry.observe(metrics.STEP_DURATION, step.took_s, step=step.kind)
        telemetry.observe(metrics.STEP_ROWS, step.rows)
        telemetry.observe(metrics.STEP_ADAPTERS, step.adapters)
        telemetry.count(metrics.KERNEL_STEPS, path=step.kernel_path)
    totals = state.totals
    telemetry.gauge(metrics.STEPS, totals.steps)
    telemetry.gauge(metrics.DEVICE_BUSY, totals.busy_ms / 1000)
    telemetry.gauge(metrics.MODELS_RUN, totals.models)
    telemetry.gauge(metrics.STEP_TOKENS, totals.prefill_tokens, step="prefill")
    telemetry.gauge(metrics.STEP_TOKENS, totals.decode_rows, step="decode")
    telemetry.gauge(metrics.READ_BYTES, totals.steps * base_bytes, weights="base")
    telemetry.gauge(metrics.READ_BYTES, totals.adapter_bytes, weights="adapter")
    telemetry.gauge(metrics.SHORTEST_STEP, totals.shortest_ms / 1000)
    telemetry.gauge(metrics.BASE_BYTES, base_bytes)
    telemetry.gauge(metrics.KV_BLOCKS, state.kv_total - state.kv_free - state.kv_cached, state="used")
    telemetry.gauge(metrics.KV_BLOCKS, state.kv_cached, state="cached")
    telemetry.gauge(metrics.KV_BLOCKS, state.kv_free, state="free")
    telemetry.gauge(metrics.POOL_BYTES, (state.page_count - state.free_pages) * state.page_bytes, state="used")
    telemetry.gauge(metrics.POOL_BYTES, state.free_pages * state.page_bytes, state="free")
    berths = Counter(resident.state.name for resident in state.residents)
    for name in metrics.RESIDENTS.labels["state"]:
        telemetry.gauge(metrics.RESIDENTS, berths[name], state=name)
    telemetry.gauge(metrics.EVICTIONS, state.evictions, reason="capacity")
    telemetry.gauge(metrics.DEVICE_LOADS, state.loads_done)
    telemetry.gauge(metrics.THRASH, state.thrashes)
    telemetry.gauge(metrics.EXECUTOR_REQUESTS, state.waiting, state="waiting")
    telemetry.gauge(metrics.EXECUTOR_REQUESTS, state.running, state="running")
    telemetry.gauge(metrics.PREEMPTIONS, state.preemptions)


def looked(*, hit: bool) -> None:
    """Counts a look for a revision on the device."""
    telemetry.count(metrics.LOOKUPS, tier="DEVICE", result="hit" if hit else "miss")


def staged(stage: Stage) -> None:
    """Counts a stage of a load that has ended."""
    telemetry.observe(metrics.LOAD_STAGES, stage.elapsed_ms / 1000, stage=stage.name, tier=stage.tier)
    if stage.name == "READY":
        telemetry.count(metrics.MOVED, stage.size_bytes, tier="HOST")
