"""The intake of bundles: receive, quarantine, verify, promote, report. The table decides, this does.

An upload's bytes are sent by a client, an import's are fetched; from there on they go one and the same way. Receiving
belongs to the client's call and ends with it. Once all bytes are here the rest is the loader's own job: it goes on when
the client hangs up, and its result is the registry's to keep. Two intakes of one revision take turns from their first
byte on (`services.loader.turns`): the second one waits for the first without a place.
"""

import asyncio
import contextlib
import io
import threading
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

import structlog

from loraport.bundle.base import BaseSpec
from loraport.bundle.envelope import Signer
from loraport.bundle.manifest import Manifest
from loraport.bundle.verdict import DEFAULT_LIMITS
from services.loader.examine import Findings, examine, promote, verification_of
from services.loader.lane import Lane
from services.loader.manifests import read_manifest
from services.loader.measure import measured
from services.loader.ports import ObjectStore, RegistryPort
from services.loader.quota import ByteQuota
from services.loader.receive import (
    MAX_CONFIG_BYTES,
    PATIENCE_S,
    Part,
    Received,
    first_envelope,
    paced,
    read_session,
    receive,
)
from services.loader.stages import Act, Broke, Ended, Event, IntakeLife, IntakeState, Refused, Report
from services.loader.turns import Turns
from services.shared import metrics, telemetry
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.futures import fault_of
from services.shared.statements import TrustedKeys, UploadSession, seal

log = structlog.get_logger()

# Pauses before a result is handed in again; after the last one the client is told, and may upload again.
REPORT_PAUSES_S = (0.2, 1.0, 3.0)

Row = tuple[str, str, str]
Observe = Callable[[Report], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an upload. Rows are (code, detail, subject)."""

    revision_id: str
    admitted: bool
    violations: tuple[Row, ...] = ()
    warnings: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """Slices of the configuration. Sizes in bytes."""

    verifier: str
    max_weights_bytes: int
    spool_dir: str | None
    max_update_norm: float = DEFAULT_LIMITS.max_update_norm


@dataclass(slots=True)
class _Job:
    session: UploadSession
    manifest: Manifest
    base: BaseSpec
    received: Received
    life: IntakeLife
    prefix: str
    observe: Observe
    fetched: bool
    turn: contextlib.AsyncExitStack
    quarantined: bool = False
    findings: Findings | None = None
    outcome: Outcome | None = None
    error: LoraportError | None = None

    @property
    def config_key(self) -> str:
        return f"{self.prefix}/config"

    @property
    def weights_key(self) -> str:
        return f"{self.prefix}/weights"


class Intake:
    """Takes uploads in. All methods belong to one event loop."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        registry: RegistryPort,
        key: Signer,
        trusted: TrustedKeys,
        clock: Clock,
        turns: Turns,
        lane: Lane,
        limits: IntakeLimits,
        quota: ByteQuota | None = None,
    ) -> None:
        self._store = store
        self._registry = registry
        self._key = key
        self._trusted = trusted
        self._clock = clock
        self._turns = turns
        self._lane = lane
        self._sessions = Lane("session", 1)
        self._limits = limits
        self._quota = quota or ByteQuota(0)
        # Quarantine keys begin with the loader's name and this run, so that a sweep never meets a running upload.
        self._run = f"{limits.verifier}/{uuid.uuid4().hex}"
        self._jobs: set[asyncio.Task[Outcome]] = set()
        self._closing = threading.Event()

    async def upload(self, parts: AsyncGenerator[Part, None]) -> Outcome:
        """Takes one upload from its session to the registry's answer.

        Raises:
            LoraportError: INVALID_REQUEST, INVALID_SESSION, UPLOAD_TOO_LARGE, OVERLOADED, QUOTA_EXCEEDED,
                STORAGE_FULL, STORE_UNAVAILABLE, REGISTRY_UNAVAILABLE, or the registry's reason for taking no result.
        """
        async with contextlib.aclosing(parts):
            envelope = await first_envelope(parts)
            return await self._take(envelope, lambda _: paced(parts, self._clock), patience_s=PATIENCE_S)

    async def fetch(
        self,
        envelope: bytes,
        source: Callable[[UploadSession], AsyncGenerator[Part, None]],
        *,
        observe: Observe,
        patience_s: float,
    ) -> Outcome:
        """Takes in what `source` gives for the session of `envelope`; it is asked only once the session is good.

        `observe` hears of every stage that ends, FETCH being the source's. `patience_s` is as for `receive`.

        Raises:
            LoraportError: as `upload`, or what the source raises.
        """
        return await self._take(envelope, source, patience_s=patience_s, observe=observe, fetched=True)

    async def _take(
        self,
        envelope: bytes,
        source: Callable[[UploadSession], AsyncGenerator[Part, None]],
        *,
        patience_s: float,
        observe: Observe = lambda _: None,
        fetched: bool = False,
    ) -> Outcome:
        limits, clock = self._limits, self._clock
        started = clock.monotonic()
        session = await read_session(
            envelope, self._trusted, self._sessions, now=clock.now(), max_weights_bytes=limits.max_weights_bytes
        )
        parts = source(session)
        async with self._turns.hold(session) as turn:
            with measured("intake", "RESOLVE", clock):
                manifest, outcome = await self._look_up(session)
                if outcome is not None:
                    return outcome
                base = await self._registry.base_spec(session.base_model)
                self._charge(session)
            # The waiting counts as well.
            observe(Report("RESOLVE", (clock.monotonic() - started) * 1000, 0))
            with measured("intake", "FETCH", clock) as found:
                received = await receive(
                    parts,
                    self._lane,
                    weights_size=session.weights_size,
                    spool_dir=limits.spool_dir,
                    patience_s=patience_s,
                )
            observe(Report("FETCH", found.took_ms, session.weights_size))
            job = _Job(
                session=session,
                manifest=manifest,
                base=base,
                received=received,
                life=IntakeLife(cause=f"{session.revision_id} upload {session.upload_id:.64}"),
                prefix=f"{self._run}/{uuid.uuid4().hex}",
                observe=observe,
                fetched=fetched,
                turn=turn.pop_all(),
            )
        task = asyncio.create_task(self._complete(job))
        self._jobs.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def sweep(self) -> int:
        """Deletes what earlier runs of this loader left in quarantine; returns how many. Blocking; ends with `close`.

        Raises:
            LoraportError: the store failed.
        """
        count = 0
        for key in self._store.keys("quarantine", f"{self._limits.verifier}/"):
            if self._closing.is_set():
                break
            if not key.startswith(f"{self._run}/"):
                self._store.delete("quarantine", key)
                count += 1
        return count

    async def close(self, timeout_s: float) -> None:
        """Lets running jobs end for a while; what they leave behind, the next run sweeps."""
        self._closing.set()
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=timeout_s)
        self._lane.close()
        self._sessions.close()

    def _charge(self, session: UploadSession) -> None:
        # A config's size is not announced, so its most is charged: a byte of weights must not bring it for nothing.
        size = session.weights_size + MAX_CONFIG_BYTES
        wait_s = self._quota.charge(session.tenant, size, now=self._clock.monotonic())
        if wait_s:
            raise LoraportError(
                "QUOTA_EXCEEDED",
                f"the tenant's bytes of a day are used up; {size} more are too many for now",
                retry_after_s=wait_s,
                quota=(f"tenants/{session.tenant}", "bytes uploaded and imported in 24 hours, a config as 64 KiB"),
            )

    async def _look_up(self, session: UploadSession) -> tuple[Manifest, Outcome | None]:
        """Returns the signed manifest, and the outcome if the revision's bytes have been judged already."""
        info = await self._registry.revision(session.revision_id)
        manifest = read_manifest(
            info.manifest_envelope,
            revision_id=session.revision_id,
            weights_digest=session.weights_digest,
            weights_size=session.weights_size,
        )
        if info.state == "PENDING":
            return manifest, None
        if info.state in ("VERIFIED", "ACTIVE", "QUARANTINED"):
            admitted = info.state != "QUARANTINED"
            reasons = () if admitted else info.reasons
            return manifest, Outcome(session.revision_id, admitted, reasons, info.warnings)
        raise LoraportError("INVALID_SESSION", f"the revision is {info.state}")

    async def _complete(self, job: _Job) -> Outcome:
        """Runs the stages to the end, in the revision's turn."""
        async with job.turn:
            try:
                _, judged = await self._look_up(job.session)
                if judged is not None:  # by another loader, while this one received
                    return judged
                acts: tuple[Act, ...] = (Act.RUN,)
                while acts == (Act.RUN,):
                    known = len(job.life.reports)
                    acts = job.life.handle(await self._stage(job))
                    for report in job.life.reports[known:]:
                        job.observe(report)
                assert acts == (Act.CLEAN,), job.life.story()
            finally:
                await self._clean(job)
        if job.outcome is None:
            assert job.error is not None
            raise job.error
        return job.outcome

    async def _stage(self, job: _Job) -> Event:
        stage = job.life.state
        try:
            with measured("intake", stage, self._clock) as found:
                match stage:
                    case IntakeState.RECEIVE:
                        job.quarantined = True
                        await self._lane.run(self._quarantine, job)
                    case IntakeState.VERIFY:
                        job.findings = await self._lane.run(self._examine, job)
                        found.outcome = "OK" if job.findings.admitted else "REFUSED"
                        for code in {violation.code for violation in job.findings.violations}:
                            telemetry.count(metrics.REFUSALS, code=code)
                    case IntakeState.PROMOTE:
                        assert job.findings is not None
                        # Equal bytes of two revisions share one object; its writers take turns.
                        async with self._turns.of_bytes(job.findings.weights_digest):
                            await self._lane.run(promote, self._store, job.findings)
                    case IntakeState.REPORT:
                        job.outcome = await self._report(job)
        except LoraportError as error:
            job.error = error
        except Exception as error:
            log.error("intake failed unexpectedly", stage=stage.value, story=job.life.story(), exc_info=error)
            job.error = LoraportError("INTERNAL")
        if job.error is not None:
            return Broke(job.error.reason)
        if stage is IntakeState.VERIFY and job.findings is not None and not job.findings.admitted:
            return Refused(found.took_ms, job.findings.weights_size)
        return Ended(found.took_ms, job.session.weights_size)

    def _quarantine(self, job: _Job) -> None:
        """Writes both files as they came."""
        received = job.received
        received.weights.seek(0)
        self._store.put("quarantine", job.config_key, io.BytesIO(received.config), len(received.config))
        self._store.put("quarantine", job.weights_key, received.weights, job.session.weights_size)
        received.weights.close()

    def _examine(self, job: _Job) -> Findings:
        return examine(
            self._store,
            config_key=job.config_key,
            weights_key=job.weights_key,
            session=job.session,
            manifest=job.manifest,
            base=job.base,
            limits=replace(
                DEFAULT_LIMITS,
                max_file_bytes=self._limits.max_weights_bytes,
                max_update_norm=self._limits.max_update_norm,
            ),
            spool_dir=self._limits.spool_dir,
            fetched=job.fetched,
        )

    async def _report(self, job: _Job) -> Outcome:
        """Signs the result and hands it in, again and again while the registry cannot be reached."""
        assert job.findings is not None
        statement = verification_of(
            job.session, job.base, job.findings, verifier=self._limits.verifier, now=self._clock.now()
        )
        envelope = await self._lane.run(seal, statement, self._key)
        state = ""
        for pause in (*REPORT_PAUSES_S, None):
            try:
                state = await self._registry.admit(envelope)
                break
            except LoraportError as error:
                if error.reason != "REGISTRY_UNAVAILABLE" or pause is None:
                    raise
                await asyncio.sleep(pause)
        log.info(
            "upload judged",
            revision_id=statement.revision_id,
            tenant=statement.tenant,
            state=state,
            codes=sorted({row[0] for row in statement.violations}),
        )
        violations = statement.violations
        if statement.admitted and state == "QUARANTINED":  # the registry knows more than we do
            violations = (await self._registry.revision(statement.revision_id)).reasons
        return Outcome(statement.revision_id, state in ("VERIFIED", "ACTIVE"), violations, statement.warnings)

    async def _clean(self, job: _Job) -> None:
        """Leaves nothing in quarantine or in the spool, whatever happened."""
        job.received.weights.close()
        if job.findings is not None:
            job.findings.weights.close()
        if not job.quarantined:
            return
        for key in (job.config_key, job.weights_key):
            try:
                await self._lane.run(self._store.delete, "quarantine", key)
            except LoraportError as error:
                log.warning("quarantine keeps an object until the next sweep", reason=error.reason)

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        self._jobs.discard(task)
        if (fault := fault_of(task)) is not None:
            # Retrieved here: the client that would have heard of it may be gone.
            log.warning("upload failed", why=str(fault))
