"""CatalogService."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from loraport.registry.v1 import catalog_service_pb2 as pb
from loraport.registry.v1 import catalog_service_pb2_grpc as stubs
from services.registry.hub import EpochHub
from services.registry.servicers import convert
from services.registry.store import feed
from services.registry.store.database import Database
from services.shared.catalog import Item
from services.shared.rpc.server import run_blocking

_AGAIN_S = 0.1


class CatalogServicer(stubs.CatalogServiceServicer):
    """Streams the catalog. A watcher's pace is its own: it reads what changed since what it last received."""

    def __init__(self, database: Database, hub: EpochHub) -> None:
        self._database = database
        self._hub = hub

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        only = request.artefacts_only
        # Everything, in chunks of different moments; then what changed meanwhile, which makes it one moment's state.
        epoch = await run_blocking(self._database.epoch)
        for kind in feed.kinds(artefacts_only=only):
            chunks = feed.scan(self._database, kind)
            while (items := await run_blocking(next, chunks, None)) is not None:
                yield _response(epoch, items, synced=False)
        synced = False
        while True:
            newest, items = await run_blocking(self._changes, epoch, only)
            if newest > epoch or not synced:
                for part in _parts(items, before=epoch, after=newest, synced=synced):
                    yield part
                epoch, synced = newest, True
            else:
                # Woken for an epoch that this connection does not see yet, as on a lagging replica.
                await asyncio.sleep(_AGAIN_S)
            await self._hub.wait_above(epoch)

    async def GetEpoch(self, request: pb.GetEpochRequest, context: Any) -> pb.GetEpochResponse:
        epoch = await run_blocking(self._database.epoch)
        # When another registry made the change, this process's watchers hear of it here first.
        self._hub.advance(epoch)
        return pb.GetEpochResponse(epoch=epoch)

    def _changes(self, since: int, only: bool) -> tuple[int, list[Item]]:
        return feed.changes(self._database, since, artefacts_only=only)


def _parts(items: Sequence[Item], *, before: int, after: int, synced: bool) -> Iterator[pb.WatchResponse]:
    """Cuts one moment's changes into messages; only the last one carries the new epoch and completes the state."""
    chunks = [items[start : start + feed.CHUNK] for start in range(0, len(items), feed.CHUNK)] or [items]
    for chunk in chunks[:-1]:
        yield _response(before, chunk, synced=synced)
    yield _response(after, chunks[-1], synced=True)


def _response(epoch: int, items: Sequence[Item], *, synced: bool) -> pb.WatchResponse:
    return pb.WatchResponse(epoch=epoch, items=map(convert.catalog_item, items), synced=synced)
