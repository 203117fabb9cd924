"""Brings revisions to the device: one load per revision, whoever asks and however often.

    resolve the signed record -> fetch sealed bytes from the loader -> hash and check them again -> arrange -> pages

A caller gets a lease of its own. A load that nobody waits for any more is given up.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, EnvelopeError, claimed_payload
from loraport.bundle.manifest import Manifest, ManifestError, parse_manifest
from services.executor.intake import HostAdapter, SignedModule, take_in
from services.executor.ports import EnginePort, Lease, LoaderPort, RecordsPort, Sealed, Stage, StageTime
from services.executor.request import RefusalReason, Refused
from services.shared.errors import LoraportError
from services.shared.statements import Record

log = structlog.get_logger()

REFUSALS = {
    RefusalReason.ADAPTER_TOO_LARGE: "POOL_TOO_SMALL",
    RefusalReason.ADAPTER_UNSUPPORTED: "WRONG_BASE",
    RefusalReason.ADAPTER_NOT_FINITE: "DIGEST_MISMATCH",
    RefusalReason.BYTES_DIGEST_MISMATCH: "DIGEST_MISMATCH",
    RefusalReason.BYTES_MALFORMED: "DIGEST_MISMATCH",
    RefusalReason.REVOKED: "REVISION_NOT_ACTIVE",
    RefusalReason.DRAINING: "DRAINING",
}


@dataclass(slots=True)
class _Arrival:
    """One load and those who wait for it. `lease` keeps the revision until each of them has its own."""

    task: asyncio.Task[None] | None = None
    waiters: int = 0
    lease: Lease | None = None
    stages: list[StageTime] = field(default_factory=list)


class Arrivals:
    """Owned by the event loop."""

    def __init__(
        self,
        engine: EnginePort,
        *,
        records: RecordsPort,
        loader: LoaderPort,
        stage: Stage,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._records = records
        self._loader = loader
        self._stage = stage
        self._monotonic = monotonic
        self._arrivals: dict[str, _Arrival] = {}
        self._stories: dict[str, tuple[StageTime, ...]] = {}

    @property
    def loading(self) -> tuple[str, ...]:
        """The revisions on their way, sorted."""
        return tuple(sorted(self._arrivals))

    def story(self, revision_id: str) -> tuple[StageTime, ...]:
        """Returns the stages of a revision's last load, also of one that is still going on."""
        arrival = self._arrivals.get(revision_id)
        return tuple(arrival.stages) if arrival is not None else self._stories.get(revision_id, ())

    async def lease(self, revision_id: str, tenant: str | None) -> tuple[Lease, float]:
        """Returns a lease on a revision on the device, and the milliseconds that bringing it there took this caller.

        Raises:
            LoraportError: the revision may not serve, or could not be brought here.
        """
        started = self._monotonic()
        record = await self._records.active(revision_id, tenant)
        lease = self._engine.acquire(revision_id)
        if lease is not None:
            return lease, 0.0
        arrival = self._arrivals.get(revision_id)
        if arrival is None:
            arrival = self._arrivals[revision_id] = _Arrival()
            arrival.task = asyncio.create_task(self._bring(record, arrival))
        assert arrival.task is not None
        arrival.waiters += 1
        try:
            await asyncio.shield(arrival.task)
            lease = self._engine.acquire(revision_id)
        finally:
            self._leave(revision_id, arrival)
        if lease is None:  # revoked or evicted by hand in the same moment
            raise LoraportError("REVISION_NOT_ACTIVE", "the revision left the device as it arrived")
        return lease, (self._monotonic() - started) * 1000.0

    def _leave(self, revision_id: str, arrival: _Arrival) -> None:
        arrival.waiters -= 1
        if arrival.waiters:
            return
        if self._arrivals.get(revision_id) is arrival:
            del self._arrivals[revision_id]
        if arrival.task is not None and not arrival.task.done():
            arrival.task.cancel()
        if arrival.lease is not None:
            self._stories[revision_id] = tuple(arrival.stages)
            arrival.lease.release()

    async def _bring(self, record: Record, arrival: _Arrival) -> None:
        try:
            sealed = await self._loader.fetch(record)
            arrival.stages.extend(sealed.stages)
            mark = self._monotonic()
            adapter = await asyncio.to_thread(check, sealed, record)
            mark = self._note(arrival, "VERIFY", mark, record.weights_size)
            staged = await asyncio.to_thread(self._stage, adapter)
            mark = self._note(arrival, "INIT", mark, record.weights_size)
            future = self._engine.load(staged)
            try:
                lease = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                if not future.cancel() and future.exception() is None:
                    future.result().release()
                raise
            self._note(arrival, "TRANSFER", mark, record.weights_size)
            arrival.stages.append(StageTime("READY", 0.0))
        except Refused as refusal:
            log.error("revision refused", revision_id=record.revision_id, reason=refusal.reason, why=refusal.detail)
            raise to_error(refusal) from None
        if arrival.waiters:
            arrival.lease = lease
        else:
            lease.release()

    def _note(self, arrival: _Arrival, stage: str, since: float, size_bytes: int) -> float:
        now = self._monotonic()
        arrival.stages.append(StageTime(stage, (now - since) * 1000.0, size_bytes))
        return now

    async def close(self) -> None:
        """Gives up every load."""
        tasks = [arrival.task for arrival in self._arrivals.values() if arrival.task is not None]
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def to_error(refusal: Refused) -> LoraportError:
    """Returns the error of a load that the intake or the engine refused."""
    reason = REFUSALS.get(refusal.reason, "INTERNAL")
    return LoraportError(reason, retry_after_s=1.0 if reason == "DRAINING" else None)


def check(sealed: Sealed, record: Record) -> HostAdapter:
    """Checks bytes and manifest against the signed record. Blocking.

    The manifest's signature is the registry's business; what binds it here is that its identity hashes to the revision
    id of the record.

    Raises:
        Refused: BYTES_DIGEST_MISMATCH or BYTES_MALFORMED.
    """
    manifest = _manifest(sealed.manifest_envelope)
    if manifest is None or manifest.revision_id != record.revision_id:
        raise Refused(RefusalReason.BYTES_DIGEST_MISMATCH, "the manifest is not the one of the record")
    modules = [
        SignedModule(module.path, module.rank, module.scaling, module.in_features, module.out_features)
        for module in manifest.modules
    ]
    return take_in(
        sealed.data,
        revision_id=record.revision_id,
        weights_digest=record.weights_digest,
        weights_size=record.weights_size,
        modules=modules,
    )


def _manifest(envelope: bytes) -> Manifest | None:
    try:
        return parse_manifest(claimed_payload(envelope, payload_type=IN_TOTO_PAYLOAD_TYPE))
    except (EnvelopeError, ManifestError):
        return None
