"""What an engine holds and does, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.executor.adapter_pool import AdapterPool, Residency
from services.executor.engine.loads import Loads
from services.executor.engine.merging import Mode, Modes
from services.executor.scheduler import Scheduler
from services.executor.step_meter import StepTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """A snapshot. Pages of `page_bytes` each; KV counts are blocks; `changes` counts changes of what is resident.

    `kv_named` has the blocks, held or cached, whose keys and values a revision made; the base's are not in it.
    """

    failed: bool
    draining: bool
    open_requests: int
    running: int
    waiting: int
    pending_loads: int
    kv_free: int
    kv_cached: int
    kv_total: int
    kv_named: Mapping[str, int]
    residents: tuple[Residency, ...]
    free_pages: int
    page_count: int
    page_bytes: int
    page_rows: int
    changes: int
    totals: StepTotals
    tokens_out: int
    preemptions: int
    evictions: int
    loads_done: int
    thrashes: int
    mode: Mode
    merged_revision_id: str | None


def read_state(
    scheduler: Scheduler,
    adapters: AdapterPool,
    loads: Loads,
    *,
    modes: Modes,
    failed: bool,
    draining: bool,
    open_requests: int,
    totals: StepTotals,
    tokens_out: int,
) -> EngineState:
    """Return a snapshot. The caller holds the engine's lock."""
    kv = scheduler.blocks.counts()
    return EngineState(
        failed=failed,
        draining=draining,
        open_requests=open_requests,
        running=scheduler.running,
        # All that was accepted and is not in the batch, also before the device thread has looked at it.
        waiting=max(0, open_requests - scheduler.running),
        pending_loads=loads.pending,
        kv_free=kv.free,
        kv_cached=kv.cached,
        kv_total=scheduler.blocks.block_count - 1,
        kv_named=scheduler.blocks.named(),
        residents=adapters.residents(),
        free_pages=adapters.free_pages,
        page_count=adapters.page_count,
        page_bytes=adapters.page_bytes,
        page_rows=adapters.page_rows,
        changes=adapters.changes,
        totals=totals,
        tokens_out=tokens_out,
        preemptions=scheduler.preemptions,
        evictions=adapters.evictions,
        loads_done=loads.done,
        thrashes=adapters.thrashes,
        mode=modes.mode,
        merged_revision_id=modes.revision_id,
    )
