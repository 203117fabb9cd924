"""An executor as a process of its own that computes nothing: its tokens say which revision they are of.

`python -m tests.support.echo_executor FOLDER NAME PORT BASE_ID EPOCH` serves until it is ended.
"""

import asyncio
import hashlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.executor.v1 import executor_service_pb2_grpc as stubs
from loraport.types.v1 import types_pb2
from services.executor.many import Events, Many

PAUSE_S = 0.01


def echo(revision_id: str, count: int) -> list[int]:
    """Returns the tokens of a revision's answer."""
    return [50 + byte % 100 for byte in hashlib.sha256(revision_id.encode()).digest()[:count]]


class EchoExecutor(stubs.ExecutorServiceServicer):
    """See the module's text."""

    def __init__(self, name: str, base_id: str, epoch: int) -> None:
        self._name, self._base_id, self._epoch = name, base_id, epoch
        self._resident: list[str] = []
        self._many = Many(self._execute)

    async def State(self, request: pb.StateRequest, context: Any) -> pb.StateResponse:
        held = [pb.DeviceRevision(revision_id=key, state="READY", size_bytes=16) for key in self._resident]
        return pb.StateResponse(
            executor=self._name, base_id=self._base_id, base_model="baseModels/tiny", epoch=self._epoch,
            sequence=len(held), state="SERVING", revisions=held, max_rank=64, max_context_tokens=64, page_rank_count=8,
            page_size_bytes=16, pool_size_bytes=160, pool_used_bytes=16 * len(held),
        )  # fmt: skip

    async def ExecuteMany(self, messages: Any, context: Any) -> AsyncIterator[pb.ExecuteManyResponse]:
        async for response in self._many.responses(messages):
            yield response

    async def _execute(self, request: pb.ExecuteRequest, _timeout_s: float) -> AsyncGenerator[Events, None]:
        told = pb.ExecuteResponse.Event
        load_ms = 0.0
        if request.revision_id not in self._resident:
            await asyncio.sleep(PAUSE_S)
            self._resident.append(request.revision_id)
            load_ms = PAUSE_S * 1000
        began = pb.ExecuteResponse.Started(revision_id=request.revision_id, base_id=self._base_id, load_ms=load_ms)
        yield [told(started=began)]
        most = request.sampling.max_tokens
        for token in echo(request.revision_id, most):
            await asyncio.sleep(PAUSE_S)
            yield [told(tokens=pb.ExecuteResponse.Tokens(token_ids=[token]))]
        usage = types_pb2.Usage(prompt_token_count=len(request.prompt_token_ids), completion_token_count=most)
        yield [told(finished=pb.ExecuteResponse.Finished(finish_reason=types_pb2.FINISH_REASON_LENGTH, usage=usage))]


async def serve(folder: Path, name: str, port: str, base_id: str, epoch: str) -> None:
    """Serves until the process is ended."""
    server = grpc.aio.server()
    stubs.add_ExecutorServiceServicer_to_server(EchoExecutor(name, base_id, int(epoch)), server)
    pair = ((folder / "peer.key").read_bytes(), (folder / "peer.pem").read_bytes())
    server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), *sys.argv[2:]))
