"""What a peer believes of the registry's log: the newest checkpoint, and a floor on disk that only rises.

A checkpoint comes with the catalog. It is believed when its signature is good, when it does not fall below the floor,
when the catalog has all the restrictions that it names, and, if the log has grown, when the registry proves that the
log it stands for begins with the one that was seen before. What is not believed changes nothing, except that a second
history is an alarm: nothing new is loaded until a checkpoint comes that continues the first. The rules are
`loraport.log.checkpoint`'s.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import structlog

from loraport.bundle.canonical import load_strict
from loraport.log import merkle
from loraport.log.checkpoint import (
    MAX_SKEW_S,
    Checkpoint,
    CheckpointError,
    Floor,
    Freshness,
    Judgement,
    freshness,
    judge,
    open_checkpoint,
)
from loraport.log.restrictions import Restrictions
from loraport.registry.v1 import log_service_pb2 as pb
from loraport.registry.v1.log_service_pb2_grpc import LogServiceStub
from loraport.types.v1 import types_pb2
from loraport.whole_file import replace_file
from services.shared.catalog import CatalogView
from services.shared.clock import Clock
from services.shared.config import ConfigError
from services.shared.errors import LoraportError
from services.shared.trust import RoleTrust, TrustStore

log = structlog.get_logger()

SCHEMA = "loraport.log-floor.v1"
PROOF_S = 5.0
# A proof that did not come is asked for again after so long.
RETRY_S = 1.0
# How long a load waits for the first checkpoint after a start.
FIRST_S = 2.0

Seen = tuple[Checkpoint, bytes]
Prove = Callable[[int, int], Awaitable[Sequence[bytes]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """How a peer treats the registry's checkpoints."""

    # File that keeps the floor over restarts; empty: it is kept in memory only, and a restart forgets it.
    state_file: str = ""
    # How long what is loaded goes on serving after the newest checkpoint has expired, seconds.
    grace_s: float = 900.0
    # Where the floor begins when there is no file: the catalog epoch that the registry must have reached.
    minimum_epoch: int = 0

    def __post_init__(self) -> None:
        if self.grace_s < 0 or self.minimum_epoch < 0:
            raise ValueError("grace_s and minimum_epoch must not be negative")


def told(seen: Seen | None) -> types_pb2.SeenCheckpoint | None:
    """Returns what a peer answers when it is asked which log it believes."""
    if seen is None:
        return None
    checkpoint, envelope = seen
    return types_pb2.SeenCheckpoint(tree_size=checkpoint.tree_size, root_hash=checkpoint.root_hash, envelope=envelope)


def checkpoint_keys(trust: TrustStore) -> RoleTrust:
    """Returns the keys that checkpoints may be signed with."""
    return trust.keys("timestamp")


def prove_by(channel: grpc.aio.Channel) -> Prove:
    """Returns a source of consistency proofs: the registry behind `channel`."""
    stub = LogServiceStub(channel)

    async def prove(old: int, new: int) -> Sequence[bytes]:
        request = pb.GetConsistencyProofRequest(old_tree_size=old, new_tree_size=new)
        answer = await stub.GetConsistencyProof(request, timeout=PROOF_S)
        return tuple(answer.hashes)

    return prove


class FloorFile:
    """Keeps a floor on disk; a crash leaves the old one or the new one. Blocking."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def read(self, default: Floor) -> Floor:
        """Returns the floor on disk, or `default` if there is none yet.

        Raises:
            ConfigError: the file is there and is no floor. It is never guessed at: a lost floor lets old logs in.
        """
        if self._path is None:
            log.warning("no state_file is configured: the newest checkpoint is forgotten at a restart")
            return default
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return default
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None
        try:
            value = load_strict(data, max_bytes=4096, max_depth=1)
            if not isinstance(value, dict) or value.get("schema") != SCHEMA:
                raise ValueError("schema")
            return Floor.of(value)
        except ValueError:
            raise ConfigError(
                f"{self._path} holds no floor of checkpoints; restore it, or remove it knowingly"
            ) from None

    def write(self, floor: Floor) -> None:
        """Replaces the floor. Raises OSError."""
        if self._path is None:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._path, [json.dumps({"schema": SCHEMA, **asdict(floor)}).encode()])


class CheckpointKeeper:
    """The newest checkpoint that is believed. Belongs to one event loop."""

    def __init__(self, prove: Prove, *, trusted: RoleTrust, policy: CheckpointPolicy, clock: Clock) -> None:
        """Reads the floor. Raises ConfigError when the state file cannot be used."""
        self._prove = prove
        self._trusted = trusted
        self._policy = policy
        self._clock = clock
        self._file = FloorFile(policy.state_file)
        self.floor = self._file.read(Floor(catalog_epoch=policy.minimum_epoch))
        self.newest: Checkpoint | None = None
        self.envelope = b""
        self.alarm = ""
        self._refused = ""
        self._waiting: tuple[bytes, Restrictions] | None = None
        self._task: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        self._judged = asyncio.Event()

    def offer(self, envelope: bytes, restrictions: Restrictions) -> None:
        """Takes a checkpoint that came with the catalog, after `restrictions`, to which more may be added meanwhile; it
        is judged in the background, the newest first."""
        self._waiting = envelope, restrictions
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._judge_all())

    async def require_fresh(self, catalog: Callable[[], CatalogView]) -> None:
        """Returns when something new may be loaded from the catalog as it is then.

        Raises:
            LoraportError: LOG_SPLIT_VIEW, CHECKPOINT_ROLLBACK (nothing newer than what was refused is known), or
                CHECKPOINT_STALE.
        """
        if self.newest is None and not self._refused:
            try:
                async with asyncio.timeout(FIRST_S):
                    await self._first.wait()
            except TimeoutError:
                raise LoraportError("CHECKPOINT_STALE", "no checkpoint of the registry has come yet") from None
        if self.alarm or self.newest is None or self._freshness(self.newest) is not Freshness.FRESH:
            raise LoraportError(self.doubt)
        view, newest = catalog(), self.newest
        restrictions = view.restraint.restrictions
        if view.epoch < newest.catalog_epoch:
            raise LoraportError("CHECKPOINT_STALE", "the catalog is older than its checkpoint")
        if not restrictions.begins_with(newest.restriction_count, newest.restriction_head):
            raise LoraportError("CHECKPOINT_STALE", "the catalog lacks restrictions that its checkpoint names")
        if restrictions.root_version > self._trusted.version:
            raise LoraportError("CHECKPOINT_STALE", "a trust root that the log names is not believed here")

    @property
    def doubt(self) -> str:
        """Why no newer checkpoint is believed: LOG_SPLIT_VIEW, CHECKPOINT_ROLLBACK, or else CHECKPOINT_STALE."""
        if self.alarm:
            return "LOG_SPLIT_VIEW"
        return "CHECKPOINT_ROLLBACK" if self._refused == Judgement.ROLLBACK else "CHECKPOINT_STALE"

    @property
    def seen(self) -> Seen | None:
        """The newest believed checkpoint and its envelope, for whoever compares what peers were told."""
        return None if self.newest is None else (self.newest, self.envelope)

    async def reach(self, tree_size: int, timeout_s: float) -> Checkpoint | None:
        """Returns the newest believed checkpoint once its tree has `tree_size` leaves; None when that took too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.newest is None or self.newest.tree_size < tree_size:
                    await self._judged.wait()
                return self.newest
        return None

    def require_alive(self) -> None:
        """Returns when what is loaded may go on serving.

        Raises:
            LoraportError: CHECKPOINT_STALE, the grace is over.
        """
        if self.newest is not None and self._freshness(self.newest) is Freshness.DEAD:
            raise LoraportError("CHECKPOINT_STALE", "the registry's checkpoint is stale and the grace is over")

    async def close(self) -> None:
        """Stops judging."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _freshness(self, checkpoint: Checkpoint) -> Freshness:
        return freshness(now=self._clock.now(), expires=checkpoint.expires, grace_s=self._policy.grace_s)

    async def _judge_all(self) -> None:
        while self._waiting is not None:
            (envelope, restrictions), self._waiting = self._waiting, None
            try:
                refused = await self._judge(envelope, restrictions)
            except grpc.RpcError as error:
                log.warning("no consistency proof", code=error.code().name)  # type: ignore[attr-defined]
                await asyncio.sleep(RETRY_S)
                self._waiting = self._waiting or (envelope, restrictions)
                continue
            except OSError as error:
                # Believing what cannot be remembered would let the next start be told an older story.
                log.error("the floor of checkpoints cannot be written", why=error.strerror)
                refused = "UNWRITTEN"
            self._refused = refused
            self._first.set()
            self._judged.set()
            self._judged = asyncio.Event()

    async def _judge(self, envelope: bytes, restrictions: Restrictions) -> str:
        """Believes a checkpoint and returns an empty text, or returns why not."""
        try:
            new = await asyncio.to_thread(open_checkpoint, envelope, self._trusted, now=self._clock.now())
        except CheckpointError as error:
            log.error("checkpoint refused", why=str(error))
            return "INVALID"
        judgement = judge(new, self.floor)
        if judgement is Judgement.GROWN and not await self._extends(new):
            judgement = Judgement.SPLIT_VIEW
        if judgement in (Judgement.ROLLBACK, Judgement.SPLIT_VIEW):
            self._refuse(new, judgement)
            return judgement
        if not restrictions.begins_with(new.restriction_count, new.restriction_head):
            log.critical(
                "ALARM: the catalog lacks restrictions that its checkpoint names",
                named=new.restriction_count,
                came=restrictions.count,
            )
            return "INCOMPLETE"
        if not restrictions.begins_with(self.floor.restriction_count, self.floor.restriction_head):
            self._refuse(new, Judgement.SPLIT_VIEW)
            return Judgement.SPLIT_VIEW
        raised = self.floor.raised(new)
        if raised != self.floor:
            await asyncio.to_thread(self._file.write, raised)
        self.floor, self.alarm = raised, ""
        # The same log may be told again by an older envelope: how long it is good for does not shrink then. Unless the
        # one that is held was signed by a clock that has been set back since: it would be good for longer than it may.
        held = self.newest
        ahead = held is not None and held.issued > self._clock.now() + MAX_SKEW_S
        if held is None or ahead or new.expires >= held.expires or judgement is Judgement.GROWN:
            self.newest, self.envelope = new, envelope
        return ""

    async def _extends(self, new: Checkpoint) -> bool:
        floor = self.floor
        proof = await self._prove(floor.tree_size, new.tree_size) if floor.tree_size else ()
        roots = bytes.fromhex(floor.root_hash), bytes.fromhex(new.root_hash)
        return merkle.verify_consistency(floor.tree_size, new.tree_size, proof, *roots)

    def _refuse(self, new: Checkpoint, judgement: Judgement) -> None:
        seen = {"seen_size": self.floor.tree_size, "seen_root": self.floor.root_hash}
        told = {"told_size": new.tree_size, "told_root": new.root_hash}
        if judgement is Judgement.SPLIT_VIEW:
            self.alarm = judgement
            log.critical("ALARM: the registry tells two histories", **seen, **told)
        else:
            log.error("checkpoint refused: rollback", **seen, **told)
