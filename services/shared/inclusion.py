"""A record counts when it is in the log that this peer believes: what is not logged can be audited by nobody.

The catalog says which leaf a record is. Before the first use of a record the registry has to prove that this leaf, with
the record's digest and the revision's name in it, is in the tree of the newest believed checkpoint. A believed tree
only ever grows, so what was proven once stays proven.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import grpc
import structlog

from loraport.bundle.digest import sha256_digest
from loraport.log import merkle
from loraport.log.checkpoint import Checkpoint
from loraport.log.leaf import Kind, LeafError, parse_leaf
from loraport.registry.v1 import log_service_pb2 as pb
from loraport.registry.v1.log_service_pb2_grpc import LogServiceStub
from services.shared.catalog import RevisionItem
from services.shared.checkpoint import CheckpointKeeper
from services.shared.errors import LoraportError
from services.shared.futures import fault_of
from services.shared.names import AdapterName, revision_name
from services.shared.rpc.asking import ask_registry

log = structlog.get_logger()

# How long a checkpoint that the registry has issued may take to arrive with the catalog and to be judged.
ARRIVAL_S = 5.0
# Proven records; one takes about 250 bytes.
MAX_PROVEN = 50_000


class LogPort(Protocol):
    """The log of the registry. Raises LoraportError: REGISTRY_UNAVAILABLE, or the registry's own reason."""

    async def newest_size(self) -> int:
        """Makes the registry issue a checkpoint of all that is in the log, if it has not, and returns its size."""

    async def inclusion(self, index: int, tree_size: int) -> tuple[bytes, Sequence[bytes]]:
        """Returns the body of a leaf and the proof that it is in the tree of `tree_size` leaves."""


class LogClient:
    """`LogPort` over a channel to the registry."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = LogServiceStub(channel)

    async def newest_size(self) -> int:
        answer = await ask_registry(self._stub.GetCheckpoint, pb.GetCheckpointRequest())
        return int(answer.tree_size)

    async def inclusion(self, index: int, tree_size: int) -> tuple[bytes, Sequence[bytes]]:
        request = pb.GetInclusionProofRequest(leaf_index=index, tree_size=tree_size)
        answer = await ask_registry(self._stub.GetInclusionProof, request)
        return answer.body, tuple(answer.hashes)


def inclusion_fault(item: RevisionItem, checkpoint: Checkpoint, body: bytes, proof: Sequence[bytes]) -> str:
    """Returns why the leaf `body` does not prove that the item's record is in the log; empty when it does."""
    try:
        leaf = parse_leaf(body)
    except LeafError as error:
        return f"what was shown is no leaf: {error}"
    name = revision_name(AdapterName(item.tenant, item.adapter), item.version)
    meant = (item.record_leaf, Kind.RECORD, name, sha256_digest(item.record_envelope))
    if (leaf.index, leaf.kind, leaf.resource, leaf.digest) != meant:
        return f"leaf {item.record_leaf} is a {leaf.kind} of {leaf.resource}, not this record"
    root = bytes.fromhex(checkpoint.root_hash)
    if not merkle.verify_inclusion(merkle.leaf_hash(body), leaf.index, checkpoint.tree_size, proof, root):
        return f"leaf {item.record_leaf} is not in the tree of {checkpoint.tree_size} leaves"
    return ""


class RecordProofs:
    """Has records proven, each once, however many ask. Belongs to one event loop."""

    def __init__(self, port: LogPort, keeper: CheckpointKeeper) -> None:
        self._port = port
        self._keeper = keeper
        # A record at a place: which keys count depends on the place, so another one is another claim.
        self._proven: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._asking: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._renewals: list[asyncio.Task[int]] = []

    async def require_logged(self, item: RevisionItem) -> None:
        """Returns when the item's record, whose signature was checked, is in the believed log.

        Raises:
            LoraportError: RECORD_NOT_LOGGED; REGISTRY_UNAVAILABLE; LOG_SPLIT_VIEW or CHECKPOINT_STALE when no
                checkpoint that could prove it is believed.
        """
        claim = (sha256_digest(item.record_envelope), item.record_leaf)
        if claim in self._proven:
            self._proven.move_to_end(claim)
            return
        task = self._asking.get(claim)
        if task is None:
            task = self._asking[claim] = asyncio.create_task(self._prove(item, claim))
            task.add_done_callback(lambda done: self._asked(claim, done))
        await asyncio.shield(task)

    def _asked(self, claim: tuple[str, int], done: asyncio.Task[None]) -> None:
        self._asking.pop(claim, None)
        fault_of(done)  # whoever waited has it

    async def _prove(self, item: RevisionItem, claim: tuple[str, int]) -> None:
        checkpoint = await self._covering(item)
        try:
            body, proof = await self._port.inclusion(item.record_leaf, checkpoint.tree_size)
        except LoraportError as error:
            if error.reason != "INVALID_REQUEST":
                raise
            raise self._refused(item, "the registry has no proof") from None
        fault = inclusion_fault(item, checkpoint, body, proof)
        if fault:
            raise self._refused(item, fault)
        self._proven[claim] = None
        if len(self._proven) > MAX_PROVEN:
            self._proven.popitem(last=False)

    async def _covering(self, item: RevisionItem) -> Checkpoint:
        """Returns a believed checkpoint of a tree that has the record's leaf."""
        newest = self._keeper.newest
        if newest is not None and newest.tree_size > item.record_leaf:
            return newest
        # The record is younger than the newest checkpoint. The new one comes with the catalog, like every other.
        size = await self._renewed()
        if size <= item.record_leaf:
            raise self._refused(item, f"the log has {size} leaves and no leaf {item.record_leaf}")
        found = await self._keeper.reach(item.record_leaf + 1, ARRIVAL_S)
        if found is None:
            raise LoraportError(
                self._keeper.doubt,
                "no believed checkpoint covers the revision's record yet",
                retry_after_s=1.0,
            )
        return found

    async def _renewed(self) -> int:
        """Returns the size of a checkpoint that was asked for after this call began; callers share the question.

        A question that is under way may be answered from before the caller's record, so the next one is waited for.
        """
        if len(self._renewals) < 2:
            before = self._renewals[-1] if self._renewals else None
            task = asyncio.create_task(self._renew(before))
            self._renewals.append(task)
            task.add_done_callback(self._renewals.remove)
        return await asyncio.shield(self._renewals[-1])

    async def _renew(self, before: asyncio.Task[int] | None) -> int:
        if before is not None:
            await asyncio.wait({before})
        return await self._port.newest_size()

    def _refused(self, item: RevisionItem, why: str) -> LoraportError:
        log.error("ALARM: a signed record is not in the log", revision_id=item.revision_id, why=why)
        return LoraportError("RECORD_NOT_LOGGED", f"revision {item.revision_id}: {why}")
