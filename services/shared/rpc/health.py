"""gRPC's health service. It is open to anybody, so nothing here waits for who asked."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as stubs


class Health(stubs.HealthServicer):  # type: ignore[misc]
    """Answers for the whole process, whose name is empty.

    grpc's own servicer sends to a watcher while it holds a lock: one that did not read kept all from being told.
    """

    def __init__(self) -> None:
        self._serving = True
        self._changed = asyncio.Event()

    def set(self, serving: bool) -> None:
        """Sets what is answered from now on."""
        self._serving = serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: pb.HealthCheckRequest, context: Any) -> AsyncIterator[pb.HealthCheckResponse]:
        last = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != last:
                yield pb.HealthCheckResponse(status=status)
                last = status
            await changed.wait()

    def _status(self, service: str) -> "pb.HealthCheckResponse.ServingStatus":
        if service:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return pb.HealthCheckResponse.SERVING if self._serving else pb.HealthCheckResponse.NOT_SERVING
