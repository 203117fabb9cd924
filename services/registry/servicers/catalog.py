"""CatalogService."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import structlog

from loraport.registry.v1 import catalog_service_pb2 as pb
from loraport.registry.v1 import catalog_service_pb2_grpc as stubs
from services.registry.checkpoints import Checkpoints, Issued
from services.registry.hub import EpochHub
from services.registry.servicers import convert
from services.registry.store import feed
from services.registry.store.database import Database
from services.shared.catalog import Item, RolloutItem
from services.shared.errors import LoraportError
from services.shared.futures import fault_of
from services.shared.rpc.guard import current_call
from services.shared.rpc.server import run_blocking

log = structlog.get_logger()

_AGAIN_S = 0.1
# A checkpoint takes long when the whole log has to be read for it, or a signer is slow; it follows when it is there.
RENEW_S = 1.0
# A peer refuses a message above 8 MiB, and then hears of nothing: an item may have 256 KiB (a trust root), so a message
# ends here whatever the number of its items.
PART_BYTES = 1 << 20


class CatalogServicer(stubs.CatalogServiceServicer):
    """Streams the catalog. A watcher's pace is its own: it reads what changed since what it last received."""

    def __init__(self, database: Database, hub: EpochHub, checkpoints: Checkpoints) -> None:
        self._database = database
        self._hub = hub
        self._checkpoints = checkpoints
        self._renewals: set[asyncio.Task[Issued]] = set()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        # Tenants, the digests of their keys and the prompts of their rollouts are for routers: what another peer has no
        # use for, its stolen certificate must not fetch either.
        router = current_call().principal.role == "router"
        only = request.artefacts_only or not router
        # Everything, in chunks of different moments; then what changed meanwhile, which makes it one moment's state.
        epoch = await run_blocking(self._database.epoch)
        self._hub.advance(epoch)
        for kind in feed.kinds(artefacts_only=only):
            # Messages are made in the thread as well: other calls must not wait for a thousand of them.
            parts = (
                pb.WatchResponse(epoch=epoch, items=chunk)
                for items in feed.scan(self._database, kind)
                for chunk in _chunks(_told(items, prompts=router))
            )
            while (part := await run_blocking(next, parts, None)) is not None:
                yield part
        synced, sent = False, 0
        # A watcher begins with a checkpoint of now: one that was made before its last connection would be a step back.
        await self._renew()
        while True:
            # The checkpoint before the changes, so that they reach at least as far.
            edition, checkpoint = self._hub.checkpoint
            newest, items = await run_blocking(self._changes, epoch, only)
            items = _told(items, prompts=router)
            if newest > epoch or edition > sent or not synced:
                envelope = checkpoint if edition > sent else b""
                for part in _parts(items, before=epoch, after=newest, synced=synced, checkpoint=envelope):
                    yield part
                epoch, synced, sent = newest, True, edition
            else:
                # Woken for an epoch that this connection does not see yet, as on a lagging replica.
                await asyncio.sleep(_AGAIN_S)
            await self._hub.wait_above(epoch, edition=sent)

    async def GetEpoch(self, request: pb.GetEpochRequest, context: Any) -> pb.GetEpochResponse:
        epoch = await run_blocking(self._database.epoch)
        # When another registry made the change, this process's watchers hear of it here first.
        self._hub.advance(epoch)
        return pb.GetEpochResponse(epoch=epoch)

    async def _renew(self) -> None:
        """Has a checkpoint of now made, and waits for it as long as a watcher may be kept from what needs none."""
        renewal = asyncio.create_task(self._checkpoints.newest())
        self._renewals.add(renewal)
        renewal.add_done_callback(self._renewed)
        await asyncio.wait({renewal}, timeout=RENEW_S)

    def _renewed(self, renewal: asyncio.Task[Issued]) -> None:
        self._renewals.discard(renewal)
        error = fault_of(renewal)
        if isinstance(error, LoraportError):
            # Peers that get no checkpoint load nothing; they are told of revocations all the same.
            log.error("a watch begins without a checkpoint", reason=error.reason, why=error.message)
        elif error is not None:
            log.error("a watch begins without a checkpoint", exc_info=error)

    def _changes(self, since: int, only: bool) -> tuple[int, list[Item]]:
        return feed.changes(self._database, since, artefacts_only=only)


def _told(items: list[Item], *, prompts: bool) -> list[Item]:
    """Returns items as a peer is told them: without `prompts` a rollout still says which revisions it needs."""
    if prompts:
        return items
    return [
        replace(item, golden_prompts=(), eval_prompts=()) if isinstance(item, RolloutItem) else item for item in items
    ]


def _parts(
    items: Sequence[Item], *, before: int, after: int, synced: bool, checkpoint: bytes
) -> Iterator[pb.WatchResponse]:
    """Cuts one moment's changes into messages; only the last one carries the new epoch and the checkpoint, and
    completes the state."""
    *chunks, last = _chunks(items)
    for chunk in chunks:
        yield pb.WatchResponse(epoch=before, items=chunk, synced=synced)
    yield pb.WatchResponse(epoch=after, items=last, synced=True, checkpoint=checkpoint)


def _chunks(items: Sequence[Item]) -> Iterator[list[pb.CatalogItem]]:
    """Cuts items into chunks of bounded length and size; one empty chunk for none."""
    chunk: list[pb.CatalogItem] = []
    size = 0
    for item in map(convert.catalog_item, items):
        more = item.ByteSize()
        if chunk and (len(chunk) == feed.CHUNK or size + more > PART_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += more
    yield chunk
