"""Makes the registry's checkpoints: every few minutes, after every revocation, and when somebody asks.

A registry that has signed one tree signs no tree that contradicts it: when the database no longer yields the root that
was signed last, somebody has changed it, and peers are left to go stale rather than told a second history. It signs
root and restrictions that it has computed from the leaves themselves, each of which a process reads once, and only
with the leaves that it committed itself. What was signed last is kept in a file outside of the database, so that a
restart between the change and the next checkpoint hides nothing.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from loraport.bundle.envelope import EnvelopeError, Signer
from loraport.log.checkpoint import Checkpoint, Floor, seal_checkpoint
from services.registry.hub import EpochHub
from services.registry.store import log as translog
from services.registry.store.database import Database
from services.shared.checkpoint import FloorFile
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.rpc.server import run_blocking

log = structlog.get_logger()

RETRY_S = 1.0
# Several revocations within this time share a checkpoint.
GATHER_S = 0.05
# How often the clock is looked at: it may be set, or the machine may have slept.
LOOK_S = 1.0
# A clock that is set right makes the newest checkpoint one of the future, which peers refuse; a step of less is none.
STEP_S = 5.0


@dataclass(frozen=True, slots=True)
class Issued:
    """A checkpoint, its signed envelope, and the key that was to sign it."""

    checkpoint: Checkpoint
    envelope: bytes
    key_id: str


class Checkpoints:
    """Issues checkpoints, by a clock that may be set either way, and tells the hub. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        key: Signer,
        hub: EpochHub,
        clock: Clock,
        *,
        life_s: int,
        interval_s: float,
        state_file: str = "",
    ) -> None:
        """`key` is the one of `services.shared.checkpoint.checkpoint_keys`; `state_file` keeps what was signed (empty:
        it is forgotten at a restart). Raises ConfigError when that cannot be used."""
        self._database = database
        self._key = key
        self._hub = hub
        self._clock = clock
        self._life_s = life_s
        self._interval_s = interval_s
        self._last: Issued | None = None
        self._file = FloorFile(state_file)
        self._signed = self._file.read(Floor())
        # Kept whatever comes of it: what is damaged costs no second reading.
        self._computed = translog.Computed()
        self._turn = asyncio.Lock()

    @property
    def last(self) -> Checkpoint | None:
        """The newest checkpoint, whatever its age; None before the first."""
        return None if self._last is None else self._last.checkpoint

    async def newest(self) -> Issued:
        """Returns a checkpoint of everything that this registry knows to be committed.

        Raises:
            LoraportError: LOG_DAMAGED, or REGISTRY_UNAVAILABLE.
        """
        async with self._turn:
            last = self._last
            newer = last is None or self._hub.epoch > last.checkpoint.catalog_epoch
            if last is None or newer or await run_blocking(self._old):
                last = self._last = await run_blocking(self._make)
                self._hub.publish(last.envelope)
            return last

    async def run(self) -> None:
        """Keeps peers supplied until the hub is closed."""
        while not self._hub.closed:
            epoch = self._hub.epoch
            try:
                if await self._due():
                    await self.newest()
            except LoraportError as error:
                tell = log.critical if error.reason == "LOG_DAMAGED" else log.error
                tell("ALARM: no checkpoint is signed", reason=error.reason, why=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._rest(epoch)
            except LoraportError:
                return

    async def _rest(self, epoch: int) -> None:
        """Returns when the catalog has changed, or time has, whether it passed or somebody set it."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, self._interval_s)):
                    await self._hub.wait_above(epoch)
                await asyncio.sleep(GATHER_S)
                return
            if self._aged():
                return

    async def _due(self) -> bool:
        if self._last is None or await run_blocking(self._old):
            return True
        return bool(await run_blocking(self._revocation_epoch) > self._last.checkpoint.revocation_epoch)

    def _old(self) -> bool:
        """Whether the last one nears its end, or another key signs since. Blocking: the key may be a program's."""
        if self._aged() or self._last is None:
            return True
        with _signing():
            return self._last.key_id != self._key.key_id

    def _aged(self) -> bool:
        """Whether its time says that the last one is to be replaced: it passed, or it was never so."""
        age = self._interval_s if self._last is None else self._clock.now() - self._last.checkpoint.issued
        return not -STEP_S <= age < self._interval_s

    def _revocation_epoch(self) -> int:
        with self._database.read() as connection:
            return translog.revocation_epoch(connection)

    def _make(self) -> Issued:
        unsigned = self._database.unsigned()
        with self._database.read() as connection:
            state = translog.state(connection)
            translog.require_extension(connection, state, self._signed)
            translog.require_appended(connection, unsigned)
            self._computed = translog.compute(connection, self._computed)
        translog.require_computed(self._computed, state)
        issued = int(self._clock.now())
        checkpoint = Checkpoint(
            tree_size=state.tree_size,
            root_hash=state.root_hash.hex(),
            catalog_epoch=state.catalog_epoch,
            revocation_epoch=state.revocation_epoch,
            restriction_count=state.listed.count,
            restriction_head=state.listed.head.hex(),
            issued=issued,
            expires=issued + self._life_s,
        )
        with _signing():
            key_id = self._key.key_id
            issue = Issued(checkpoint, seal_checkpoint(checkpoint, self._key), key_id)
        self._remember(Floor().raised(checkpoint))
        self._database.signed(unsigned)
        return issue

    def _remember(self, signed: Floor) -> None:
        """Keeps what was signed, before anybody hears of it. Raises LoraportError (REGISTRY_UNAVAILABLE)."""
        try:
            if signed != self._signed:
                self._file.write(signed)
        except OSError as error:
            log.error("checkpoints cannot be remembered", why=error.strerror)
            raise LoraportError("REGISTRY_UNAVAILABLE", "checkpoints cannot be kept", retry_after_s=RETRY_S) from None
        self._signed = signed


@contextlib.contextmanager
def _signing() -> Iterator[None]:
    """A signer that cannot sign now is asked again, like a database: it may be a program, or wait for its key."""
    try:
        yield
    except EnvelopeError as error:
        log.error("checkpoints cannot be signed", why=error.detail)
        raise LoraportError("REGISTRY_UNAVAILABLE", "checkpoints cannot be signed", retry_after_s=RETRY_S) from None
