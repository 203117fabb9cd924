"""The other ends of `bench.router`, each a process of its own.

`python -m bench.router_peers executor FOLDER NAME PORT BASE_ID` is an executor that computes nothing: it answers every
prompt at once with the tokens that were asked for, in one message, as executors tell all that they have; one whose
answer may be `HELD` tokens long gets one token and then nothing more until its caller leaves.
`python -m bench.router_peers relay FOLDER PORT EXECUTOR_PORT` is the least that a router in this language can be: it
authenticates nothing, decides nothing and passes on the executor's messages as they come, unread. What it reaches is
the ceiling for any router that is built on the same gRPC library and makes a call for each request.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.executor.v1 import executor_service_pb2_grpc as stubs
from loraport.types.v1 import types_pb2
from services.executor.many import Events, Many

HELD = 40
GENERATE, EXECUTE = "/loraport.router.v1.InferenceService/Generate", "/loraport.executor.v1.ExecutorService/Execute"


class NullExecutor(stubs.ExecutorServiceServicer):
    """See the module's text."""

    def __init__(self, name: str, base_id: str) -> None:
        self._name = name
        self._base_id = base_id
        self._many = Many(self._execute)

    async def State(self, request: pb.StateRequest, context: Any) -> pb.StateResponse:
        return pb.StateResponse(
            executor=self._name, base_id=self._base_id, base_model="baseModels/tiny", epoch=1, sequence=1,
            state="SERVING", max_rank=64, max_context_tokens=64,
        )  # fmt: skip

    async def Execute(self, request: pb.ExecuteRequest, context: Any) -> AsyncIterator[pb.ExecuteResponse]:
        async for events in self._execute(request, 60.0):
            yield pb.ExecuteResponse(events=events)

    async def ExecuteMany(self, messages: Any, context: Any) -> AsyncIterator[pb.ExecuteManyResponse]:
        async for response in self._many.responses(messages):
            yield response

    async def _execute(self, request: pb.ExecuteRequest, _timeout_s: float) -> AsyncGenerator[Events, None]:
        told = pb.ExecuteResponse.Event
        began = pb.ExecuteResponse.Started(revision_id=request.revision_id, base_id=self._base_id)
        most = request.sampling.max_tokens or 4
        made = pb.ExecuteResponse.Tokens(token_ids=[50] if most == HELD else [50] * most, kernel_path="null")
        events = [told(started=began), told(tokens=made)]
        if most == HELD:
            yield events
            await asyncio.Event().wait()
        usage = types_pb2.Usage(prompt_token_count=len(request.prompt_token_ids), completion_token_count=most)
        reason = types_pb2.FINISH_REASON_LENGTH
        ended = pb.ExecuteResponse.Finished(finish_reason=reason, usage=usage, kernel_path="null")
        yield [*events, told(finished=ended)]


class BareRelay(grpc.GenericRpcHandler):
    """See the module's text."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._execute = channel.unary_stream(EXECUTE)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._relay) if details.method == GENERATE else None

    async def _relay(self, request: bytes, context: Any) -> None:
        call = self._execute(b"")
        while (message := await call.read()) is not grpc.aio.EOF:
            await context.write(message)


async def serve(arguments: list[str]) -> None:
    """Serves until the process is ended."""
    kind, folder = arguments[0], Path(arguments[1])
    server = grpc.aio.server()
    if kind == "executor":
        name, port, base_id = arguments[2:]
        stubs.add_ExecutorServiceServicer_to_server(NullExecutor(name, base_id), server)
    else:
        port, behind = arguments[2:]
        root = (folder / "ca.pem").read_bytes()
        channel = grpc.aio.secure_channel(f"127.0.0.1:{behind}", grpc.ssl_channel_credentials(root))
        server.add_generic_rpc_handlers((BareRelay(channel),))
    pair = ((folder / "peer.key").read_bytes(), (folder / "peer.pem").read_bytes())
    server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
