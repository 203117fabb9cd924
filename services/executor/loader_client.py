"""The port to the loader: EnsureHost, then the bytes, then the lease is given back.

On the loader's own host the bytes are its sealed memory, handed over (`handover`): nothing is copied, and the lease is
kept while they are looked at. Everywhere else, and whenever that fails, ReadBlob copies them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import structlog

from loraport.loader.v1 import loader_service_pb2 as pb
from loraport.loader.v1.loader_service_pb2_grpc import LoaderServiceStub
from loraport.types.v1 import types_pb2
from services.executor.handover import HandoverFailed, take_over
from services.executor.ports import HostBytes, Stage
from services.shared import tracing
from services.shared.errors import LoraportError
from services.shared.rpc.status import connection_broke, from_rpc_error

log = structlog.get_logger()

RELEASE_S = 5.0
_UNAVAILABLE = "LOADER_UNAVAILABLE"
_TIERS: dict[int, str] = {types_pb2.TIER_STORE: "STORE", types_pb2.TIER_DISK: "DISK"}


class LoaderClient:
    """The port `Loader` over one channel, which it closes."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float) -> None:
        self._channel = channel
        self._stub = LoaderServiceStub(channel)
        self._timeout_s = timeout_s
        self._releases: set[asyncio.Task[None]] = set()

    async def fetch(self, revision_id: str, *, size_bytes: int, on_stage: Callable[[Stage], None]) -> HostBytes:
        try:
            return await self._fetch(revision_id, size_bytes, on_stage)
        except grpc.RpcError as error:
            if not connection_broke(error):
                raise from_rpc_error(error, unavailable=_UNAVAILABLE) from None
        # A connection that was idle may be dead without a word (a machine that stood still); a load may be repeated.
        try:
            return await self._fetch(revision_id, size_bytes, on_stage)
        except grpc.RpcError as error:
            raise from_rpc_error(error, unavailable=_UNAVAILABLE) from None

    async def _fetch(self, revision_id: str, size_bytes: int, on_stage: Callable[[Stage], None]) -> HostBytes:
        lease = await self._ensure(revision_id, on_stage)
        try:
            if lease.size_bytes != size_bytes:
                raise LoraportError("DIGEST_MISMATCH", "the loader holds a file of another size")
            mapped = await self._take_over(lease)
            if mapped is not None:
                return HostBytes(mapped, lease.manifest_envelope, lambda: self._give_back(lease.lease_id))
            data = await self._read(lease.lease_id, size_bytes)
        except BaseException:
            self._give_back(lease.lease_id)
            raise
        self._give_back(lease.lease_id)
        return HostBytes(memoryview(data), lease.manifest_envelope)

    async def _take_over(self, lease: pb.HostLease) -> memoryview | None:
        """Returns the lease's memory itself, None when it cannot be had."""
        if not lease.handover_socket:
            return None
        try:
            return await asyncio.to_thread(
                take_over, lease.handover_socket, lease.handover_token, lease.lease_id, size_bytes=lease.size_bytes
            )
        except HandoverFailed as error:
            say = log.error if error.suspicious else log.info
            say("host memory was not handed over, reading it instead", why=str(error))
            return None

    async def _ensure(self, revision_id: str, on_stage: Callable[[Stage], None]) -> pb.HostLease:
        request = pb.EnsureHostRequest(revision_id=revision_id)
        call = self._stub.EnsureHost(request, timeout=self._timeout_s, metadata=tracing.outgoing())
        lease: pb.HostLease | None = None
        async for response in call:
            if response.WhichOneof("event") == "lease":
                lease = response.lease
            else:
                name = types_pb2.LoadStage.Name(response.stage.stage).removeprefix("LOAD_STAGE_")
                tier = _TIERS.get(response.stage.tier, "")
                on_stage(Stage(name, response.stage.elapsed_ms, response.stage.size_bytes, tier))
        if lease is None:
            raise LoraportError(_UNAVAILABLE, "the loader ended without a lease", retry_after_s=1.0)
        return lease

    async def _read(self, lease_id: str, size_bytes: int) -> bytearray:
        """Fills one buffer of the signed size; what is more or less than that is refused."""
        data, position = bytearray(size_bytes), 0
        request, metadata = pb.ReadBlobRequest(lease_id=lease_id), tracing.outgoing()
        async for piece in self._stub.ReadBlob(request, timeout=self._timeout_s, metadata=metadata):
            end = position + len(piece.data)
            if end > size_bytes:
                raise LoraportError("DIGEST_MISMATCH", "the loader sent more bytes than the record says")
            data[position:end] = piece.data
            position = end
        if position != size_bytes:
            raise LoraportError("DIGEST_MISMATCH", f"the loader sent {position} of {size_bytes} bytes")
        return data

    def _give_back(self, lease_id: str) -> None:
        """Not awaited: a lost release costs the loader a lease that expires, not this load its time."""
        task = asyncio.create_task(self._release(lease_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, lease_id: str) -> None:
        with contextlib.suppress(grpc.RpcError):
            await self._stub.ReleaseHost(pb.ReleaseHostRequest(lease_id=lease_id), timeout=RELEASE_S)

    async def close(self) -> None:
        """Waits for leases to be given back and closes the channel."""
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self._channel.close()
