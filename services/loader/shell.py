"""Brings weights into host memory and hands out leases: the tables decide, this does.

One load per digest, whoever asks; every caller's revision is resolved for itself, so bytes that two tenants share are
fetched once and granted twice, in the turn of whichever comes first. Blocking work runs in threads that look at a stop
flag between two pieces.
"""

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from services.loader.bad_digests import BadDigests
from services.loader.disk_cache import DiskCache
from services.loader.handover import Tokens
from services.loader.host_tier import HostTier, TierFull
from services.loader.lane import Lane
from services.loader.loading import Load, SpoiledCopy, fetch, keep, seal, verify
from services.loader.measure import fetched, looked, measured
from services.loader.ports import ObjectStore, RegistryPort
from services.loader.resolve import Resolved, Resolver
from services.loader.sealed import Blob, Reader
from services.loader.slots import Slots
from services.loader.stages import Act, Broke, Ended, Event, LoadLife, LoadState, Report, Spoiled
from services.shared.catalog import RevisionItem
from services.shared.checkpoint import Seen
from services.shared.clock import Clock
from services.shared.errors import LoraportError

log = structlog.get_logger()

CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease, what it is of, and the token that its bytes are handed over for (empty: they are not)."""

    lease_id: str
    resolved: Resolved
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the host tier holds. Entries are (digest, size, lease count, stages), loads (digest, state, waiters).

    `seen` is the checkpoint of the registry's log that this loader believes.
    """

    entries: tuple[tuple[str, int, int, tuple[Report, ...]], ...]
    loads: tuple[tuple[str, LoadState, int], ...]
    used_bytes: int
    budget_bytes: int
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the tier has of a digest, and the stages in which it came there."""

    blob: Blob
    stages: tuple[Report, ...]


class HostLoader:
    """The host tier of one node. All methods belong to one event loop."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        registry: RegistryPort,
        resolver: Resolver,
        clock: Clock,
        tier: HostTier,
        bad: BadDigests,
        slots: Slots,
        lane: Lane,
        disk: DiskCache | None = None,
        hands_over: bool = False,
    ) -> None:
        self._store = store
        self._registry, self._resolver = registry, resolver
        self._clock = clock
        self._tier = tier
        self._bad = bad
        self._slots, self._lane = slots, lane
        self._disk, self._hands_over = disk, hands_over
        self._tokens = Tokens()
        self._loads: dict[str, Load] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # One file at a time is written to the node's disk: loads go first.
        self._writing = asyncio.Semaphore(1)
        self._closing = threading.Event()

    async def ensure(self, revision_id: str, *, holder: str) -> AsyncIterator[Report | Granted]:
        """Yields the stages of the load as they end, the lease last.

        Raises:
            LoraportError: what Resolver.resolve and RegistryPort.require_fresh raise, HOST_TIER_FULL, DIGEST_MISMATCH,
                STORE_UNAVAILABLE or LOAD_CANCELLED.
        """
        life = LoadLife(cause=f"{revision_id} for {holder}")
        life.join(holder)
        try:
            with measured("load", life.state, self._clock) as found:
                resolved = await self._resolver.resolve(revision_id)
        except LoraportError as error:
            life.handle(Broke(error.reason))
            raise
        life.handle(Ended(found.took_ms))
        yield life.reports[0]
        digest = resolved.weights_digest
        if self._tier.find(digest) is None:
            await self._registry.require_fresh()
        if not self._registry.is_active(revision_id):  # it went while its checkpoint was asked for
            raise _not_active(revision_id)
        self._tier.revive(digest)
        if looked("HOST", hit=self._tier.find(digest) is not None):
            yield self._grant(resolved, holder)
            return
        why = self._bad.find(digest, now=self._clock.monotonic())
        if why is not None:
            raise LoraportError("DIGEST_MISMATCH", why)
        load = self._loads.get(digest)
        if load is None:
            token = f"load-{secrets.token_hex(8)}"
            load = self._loads[digest] = Load(digest=digest, size_bytes=resolved.size_bytes, token=token, life=life)
        else:
            load.life.join(holder)
        self._take_turn(load, resolved.tenant)
        try:
            async for report in _follow(load):
                yield report
            if load.life.state is LoadState.CANCELLED:
                raise LoraportError("LOAD_CANCELLED")
            if load.error is not None:
                raise _again(load.error)
            granted = self._grant(resolved, holder)
        finally:
            self._carry_out(load, load.life.leave(holder))
        yield granted

    def open_reader(self, lease_id: str, *, holder: str) -> Reader:
        """Returns a reader of a lease's bytes. Raises LoraportError (LEASE_NOT_FOUND)."""
        digest = self.use(lease_id, holder=holder)
        return self._loaded[digest].blob.open_reader()

    def hand_over(self, token: bytes, lease_key: bytes) -> int | None:
        """Returns a descriptor of the sealed memory that a token stands for, None when it stands for nothing.

        The token is used up, and the caller closes the descriptor. Raises OSError.
        """
        found = self._tokens.redeem(token, lease_key)
        if found is None:
            return None
        lease = self._tier.use(found[0], holder=found[1], now=self._clock.monotonic())
        return None if lease is None else self._loaded[lease.digest].blob.open_handover()

    def use(self, lease_id: str, *, holder: str) -> str:
        """Notes the use of a lease and returns its digest. Raises LoraportError (LEASE_NOT_FOUND)."""
        lease = self._tier.use(lease_id, holder=holder, now=self._clock.monotonic())
        if lease is None:
            raise LoraportError("LEASE_NOT_FOUND")
        return lease.digest

    def release(self, lease_id: str, *, holder: str) -> None:
        """Gives a lease back; one that the holder does not have is given back already."""
        if self._tier.use(lease_id, holder=holder, now=self._clock.monotonic()) is not None:
            self._tokens.drop(lease_id)
            self._close(self._tier.release(lease_id))

    async def cancel(self, revision_id: str, *, holder: str) -> bool:
        """Stops a revision's load for `holder`; returns False when others wait for it.

        Raises:
            LoraportError: LOAD_NOT_FOUND, or REGISTRY_UNAVAILABLE.
        """
        item = await self._registry.item(revision_id)
        load = self._loads.get(item.weights_digest) if item is not None else None
        if load is None:
            raise LoraportError("LOAD_NOT_FOUND")
        acts = load.life.cancel(holder)
        if acts is None:
            return False
        self._carry_out(load, acts)
        return True

    def inventory(self) -> Inventory:
        """Returns what is held and what is being loaded."""
        held = (entry for entry in self._tier.entries() if entry.digest in self._loaded)  # none once it is closed
        return Inventory(
            entries=tuple((e.digest, e.size_bytes, e.holders, self._loaded[e.digest].stages) for e in held),
            loads=tuple((load.digest, load.life.state, load.life.waiter_count) for load in self._loads.values()),
            used_bytes=self._tier.used_bytes,
            budget_bytes=self._tier.budget_bytes,
            seen=self._registry.seen(),
        )

    def gone(self, items: list[RevisionItem]) -> None:
        """Hears of revisions that may serve no longer: their bytes leave with their last lease."""
        self._resolver.forget(item.revision_id for item in items)
        for digest in {item.weights_digest for item in items}:
            if not self._registry.active_digest(digest):
                self._close(self._tier.doom(digest))
                if self._disk is not None:
                    self._spawn(_drop(self._lane, self._disk, digest))

    def expire_leases(self, *, idle_s: float) -> None:
        """Takes back leases that were not used for `idle_s`."""
        expired, left = self._tier.expire(now=self._clock.monotonic(), idle_s=idle_s)
        if expired:
            log.warning("leases expired", count=len(expired))
        for lease_id in expired:
            self._tokens.drop(lease_id)
        self._close(left)

    async def close(self) -> None:
        """Stops every load and gives all memory back."""
        self._closing.set()
        for load in list(self._loads.values()):
            load.stop.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        self._close(list(self._loaded))
        self._lane.close()

    def _take_turn(self, load: Load, tenant: str) -> None:
        # Each tenant waits in its own queue: nobody may have a load of others behind many of its own.
        if tenant not in load.tenants and not load.begun:
            self._spawn(self._run(load, tenant))
        load.tenants |= {tenant}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _grant(self, resolved: Resolved, holder: str) -> Granted:
        # The revision may have been revoked while its bytes were on their way.
        if not self._registry.is_active(resolved.revision_id) or self._tier.find(resolved.weights_digest) is None:
            raise _not_active(resolved.revision_id)
        lease_id = secrets.token_hex(16)
        self._lease(resolved.weights_digest, lease_id, holder=holder, tenant=resolved.tenant)
        token = self._tokens.issue(lease_id, holder) if self._hands_over else b""
        return Granted(lease_id, resolved, token)

    def _lease(self, digest: str, lease_id: str, *, holder: str, tenant: str) -> None:
        self._tier.lease(digest, lease_id, holder=holder, tenant=tenant, now=self._clock.monotonic())

    async def _run(self, load: Load, tenant: str) -> None:
        """Runs the stages to the end of the load in a tenant's turn, unless another's turn has come first."""
        try:
            async with self._slots.hold(tenant):
                if load.begun:
                    return
                load.begun = True
                acts = deque([Act.RUN])
                while acts:
                    act = acts.popleft()
                    if act is Act.RUN:
                        acts.extend(load.life.handle(await self._stage(load)))
                    else:
                        self._carry_out(load, (act,))
                    self._tell(load)
        except Exception as error:
            log.error("load fell over", story=load.life.story(), exc_info=error)
            load.error, load.life.state = LoraportError("INTERNAL"), LoadState.FAILED
            self._carry_out(load, (Act.DISCARD,))
            self._tell(load)

    async def _stage(self, load: Load) -> Event:
        stage = load.life.state
        try:
            with measured("load", stage, self._clock) as found:
                match stage:
                    case LoadState.FETCH:
                        self._reserve(load)
                        await self._lane.run(fetch, load, self._store, self._disk)
                        fetched(found, load.tier, load.size_bytes, has_disk=self._disk is not None)
                    case LoadState.VERIFY:
                        await self._lane.run(verify, load, self._disk)
                    case LoadState.STAGE_HOST:
                        await self._lane.run(seal, load)
        except SpoiledCopy:
            return Spoiled(found.took_ms, load.size_bytes)
        except LoraportError as error:
            load.error = error
        except Exception as error:
            log.error("load failed unexpectedly", digest=load.digest, stage=stage.value, exc_info=error)
            load.error = LoraportError("INTERNAL")
        if load.error is None:
            tier = load.tier if stage is LoadState.FETCH else ""
            return Ended(found.took_ms, load.size_bytes, tier)
        if load.error.reason == "DIGEST_MISMATCH":
            log.error("stored bytes are not what was signed", digest=load.digest, why=load.error.message)
            self._bad.add(load.digest, load.error.message, now=self._clock.monotonic())
        return Broke(load.error.reason)

    def _reserve(self, load: Load) -> None:
        if load.stop.is_set():
            raise LoraportError("LOAD_CANCELLED")
        if load.spoiled:  # the room is there from the first try
            return
        needed = self._registry.needed()
        try:
            self._close(self._tier.reserve(load.token, load.size_bytes, tenants=load.tenants, last=needed))
        except TierFull as error:
            raise LoraportError("HOST_TIER_FULL", f"memory is in use: {error}", retry_after_s=1.0) from None

    def _carry_out(self, load: Load, acts: tuple[Act, ...]) -> None:
        for act in acts:
            match act:
                case Act.PUBLISH:
                    assert load.blob is not None
                    self._tier.commit(load.token, load.digest, now=self._clock.monotonic())
                    self._loaded[load.digest], load.blob = _Loaded(load.blob, tuple(load.life.reports)), None
                    if self._disk is not None and load.tier == "STORE":
                        # Pinned meanwhile: what is being copied is in memory, so the books must say so.
                        pin = f"disk-{load.token}"
                        self._lease(load.digest, pin, holder="", tenant=min(load.tenants))
                        self._spawn(self._keep(self._disk, load.digest, pin))
                case Act.UNPIN:
                    self._close(self._tier.release(load.token))
                    if not self._registry.active_digest(load.digest):
                        self._close(self._tier.doom(load.digest))
                case Act.STOP:
                    log.info("load stopped", story=load.life.story())
                    load.stop.set()
                    self._tell(load)
                case Act.DISCARD:
                    if load.life.state is LoadState.FAILED:
                        log.warning("load failed", story=load.life.story())
                    self._tier.cancel(load.token)
                    load.discard()

    async def _keep(self, disk: DiskCache, digest: str, pin: str) -> None:
        """Copies a loaded digest to the node's disk, then drops the pin."""
        try:
            async with self._writing:
                entry = self._tier.find(digest)
                if digest in self._loaded and entry is not None:  # else the loader is closing, or it may not serve
                    reader = self._loaded[digest].blob.open_reader()
                    await self._lane.run(keep, disk, digest, entry.tenants, reader, self._closing)
                    if not self._tier.find(digest):  # it was doomed when there was nothing to drop yet
                        await _drop(self._lane, disk, digest)
        except OSError as error:
            log.warning("disk tier could not keep a file", why=str(error))
        finally:
            self._close(self._tier.release(pin))

    def _tell(self, load: Load) -> None:
        if load.life.final and self._loads.get(load.digest) is load:  # it can be joined no longer
            del self._loads[load.digest]
        load.tell()

    def _close(self, digests: list[str]) -> None:
        for digest in digests:
            self._loaded.pop(digest).blob.close()


def _not_active(revision_id: str) -> LoraportError:
    return LoraportError("REVISION_NOT_ACTIVE", f"revision {revision_id} is no longer ACTIVE")


async def _drop(lane: Lane, disk: DiskCache, digest: str) -> None:
    await lane.run(disk.forget, digest)


async def _follow(load: Load) -> AsyncIterator[Report]:
    """Yields the stages after RESOLVE, until the load has ended."""
    seen = 1
    while True:
        changed = load.changed
        for report in load.life.reports[seen:]:
            seen += 1
            yield report
        if load.life.final and seen == len(load.life.reports):
            return
        if not load.life.final:
            await changed.wait()


def _again(error: LoraportError) -> LoraportError:
    """Returns an equal error: an exception that several tasks raise would collect all their tracebacks."""
    return LoraportError(error.reason, error.message, retry_after_s=error.retry_after_s)
