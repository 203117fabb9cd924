"""`LoaderService`: protocol buffers at the door, plain values inside."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

from loraport.bundle.digest import is_digest
from loraport.loader.v1 import loader_service_pb2 as pb
from loraport.loader.v1.loader_service_pb2_grpc import LoaderServiceServicer
from loraport.types.v1 import types_pb2
from services.loader.fetch.sources import HttpsReference, HubReference, Reference, S3Reference
from services.loader.imports import Imports
from services.loader.intake import Intake, Outcome, Row
from services.loader.receive import ChunkPart, Part, SessionPart
from services.loader.shell import Granted, HostLoader
from services.loader.stages import Report
from services.shared.checkpoint import told
from services.shared.errors import LoraportError
from services.shared.rpc.guard import current_call
from services.shared.rpc.server import run_blocking

_FILES: dict[int, Literal["config", "weights"]] = {
    pb.FileChunk.FILE_CONFIG: "config",
    pb.FileChunk.FILE_WEIGHTS: "weights",
}

_TIERS = {"": types_pb2.TIER_UNSPECIFIED, "STORE": types_pb2.TIER_STORE, "DISK": types_pb2.TIER_DISK}

# The stages of an intake that a caller hears of; the others are the loader's own affair. What PROMOTE takes would say
# whether the store has the bytes already, from whomever.
_IMPORT_STAGES = frozenset({"RESOLVE", "FETCH", "VERIFY"})


class LoaderServicer(LoaderServiceServicer):
    """The loader's calls."""

    def __init__(
        self, host: HostLoader, intake: Intake, imports: Imports, *, upload_idle_s: float, handover_socket: str = ""
    ) -> None:
        self._host = host
        self._intake = intake
        self._imports = imports
        self._upload_idle_s = upload_idle_s
        self._handover_socket = handover_socket

    async def Upload(self, request_iterator: Any, context: Any) -> pb.UploadResponse:
        return _result(await self._intake.upload(_parts(request_iterator, self._upload_idle_s)))

    async def Import(self, request: pb.ImportRequest, context: Any) -> AsyncIterator[pb.ImportResponse]:
        events = self._imports.run(request.session, _reference(request))
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Outcome):
                    yield pb.ImportResponse(result=_result(event))
                elif event.stage in _IMPORT_STAGES:
                    yield pb.ImportResponse(stage=_stage(event))

    async def EnsureHost(self, request: pb.EnsureHostRequest, context: Any) -> AsyncIterator[pb.EnsureHostResponse]:
        holder = current_call().principal.label
        events = self._host.ensure(_revision_id(request.revision_id), holder=holder)
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Report):
                    yield pb.EnsureHostResponse(stage=_stage(event))
                else:
                    # Not taken back when the call breaks now: the caller may have it. An unused lease expires.
                    yield pb.EnsureHostResponse(lease=_lease(event, self._handover_socket))

    async def ReadBlob(self, request: pb.ReadBlobRequest, context: Any) -> AsyncIterator[pb.ReadBlobResponse]:
        holder = current_call().principal.label
        reader = self._host.open_reader(request.lease_id, holder=holder)
        # The call may end while this generator is suspended; the descriptor must not wait for its collection.
        context.add_done_callback(lambda _: reader.close())
        try:
            while piece := await run_blocking(reader.next_piece):
                yield pb.ReadBlobResponse(data=piece)
        finally:
            reader.close()
        with contextlib.suppress(LoraportError):  # given back meanwhile
            self._host.use(request.lease_id, holder=holder)

    async def ReleaseHost(self, request: pb.ReleaseHostRequest, context: Any) -> pb.ReleaseHostResponse:
        self._host.release(request.lease_id, holder=current_call().principal.label)
        return pb.ReleaseHostResponse()

    async def Inventory(self, request: pb.InventoryRequest, context: Any) -> pb.InventoryResponse:
        found = self._host.inventory()
        return pb.InventoryResponse(
            entries=[
                pb.HostEntry(
                    weights_digest=digest, size_bytes=size, lease_count=leases, stages=[_stage(s) for s in stages]
                )
                for digest, size, leases, stages in found.entries
            ],
            loads=[
                pb.LoadEntry(weights_digest=digest, stage=_load_stage(state), waiter_count=waiters)
                for digest, state, waiters in found.loads
            ],
            used_bytes=found.used_bytes,
            budget_bytes=found.budget_bytes,
            checkpoint=told(found.seen),
        )

    async def CancelLoad(self, request: pb.CancelLoadRequest, context: Any) -> pb.CancelLoadResponse:
        holder = current_call().principal.label
        cancelled = await self._host.cancel(_revision_id(request.revision_id), holder=holder)
        return pb.CancelLoadResponse(cancelled=cancelled)


async def _parts(messages: Any, idle_s: float) -> AsyncGenerator[Part, None]:
    """Yields the parts of an upload that keeps sending."""
    iterator = aiter(messages)
    while True:
        try:
            async with asyncio.timeout(idle_s):
                message = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise LoraportError("DEADLINE_EXCEEDED", f"the upload sent nothing for {idle_s:g} s") from None
        match message.WhichOneof("part"):
            case "session":
                yield SessionPart(message.session)
            case "chunk" if message.chunk.file in _FILES:
                yield ChunkPart(_FILES[message.chunk.file], message.chunk.data)
            case _:
                raise LoraportError("INVALID_REQUEST", "a message must hold a session or a chunk of a known file")


def _reference(request: pb.ImportRequest) -> Reference:
    match request.WhichOneof("source"):
        case "s3":
            found = request.s3
            return S3Reference(found.endpoint, found.bucket, found.config_key, found.weights_key)
        case "hub":
            return HubReference(request.hub.repository, request.hub.commit)
        case "https":
            return HttpsReference(request.https.config_url, request.https.weights_url)
        case _:
            raise LoraportError("INVALID_REQUEST", "an import names its source", subject="source")


def _result(outcome: Outcome) -> pb.UploadResponse:
    return pb.UploadResponse(
        revision_id=outcome.revision_id,
        admitted=outcome.admitted,
        violations=_violations(outcome.violations),
        warnings=_violations(outcome.warnings),
    )


def _revision_id(value: str) -> str:
    if not is_digest(value):
        raise LoraportError("INVALID_REQUEST", "revision_id must be sha256:<64 hex>", subject="revision_id")
    return value


def _load_stage(stage: str) -> Any:
    return types_pb2.LoadStage.Value(f"LOAD_STAGE_{stage}")


def _stage(report: Report) -> types_pb2.StageReport:
    return types_pb2.StageReport(
        stage=_load_stage(report.stage),
        elapsed_ms=report.elapsed_ms,
        size_bytes=report.size_bytes,
        tier=_TIERS[report.tier],
    )


def _lease(granted: Granted, handover_socket: str) -> pb.HostLease:
    resolved = granted.resolved
    return pb.HostLease(
        lease_id=granted.lease_id,
        weights_digest=resolved.weights_digest,
        size_bytes=resolved.size_bytes,
        manifest_envelope=resolved.manifest_envelope,
        record_envelope=resolved.record_envelope,
        handover_token=granted.token,
        handover_socket=handover_socket if granted.token else "",
    )


def _violations(rows: tuple[Row, ...]) -> list[types_pb2.Violation]:
    return [types_pb2.Violation(code=code, detail=detail, subject=subject) for code, detail, subject in rows]
