"""An executor that computes nothing, as a process of its own, for `bench.router`.

`python -m bench.router_peers FOLDER NAME PORT BASE_ID` answers every prompt at once with the tokens that were asked
for; one whose answer may be `HELD` tokens long gets one token and then nothing more until its caller leaves.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.executor.v1 import executor_service_pb2_grpc as stubs
from loraport.types.v1 import types_pb2

HELD = 40


class NullExecutor(stubs.ExecutorServiceServicer):
    """See the module's text."""

    def __init__(self, name: str, base_id: str) -> None:
        self._name = name
        self._base_id = base_id

    async def State(self, request: pb.StateRequest, context: Any) -> pb.StateResponse:
        return pb.StateResponse(
            executor=self._name, base_id=self._base_id, base_model="baseModels/tiny", epoch=1, sequence=1,
            state="SERVING", max_rank=64, max_context_tokens=64,
        )  # fmt: skip

    async def Execute(self, request: pb.ExecuteRequest, context: Any) -> AsyncIterator[pb.ExecuteResponse]:
        yield pb.ExecuteResponse(
            started=pb.ExecuteResponse.Started(revision_id=request.revision_id, base_id=self._base_id)
        )
        most = request.sampling.max_tokens
        tokens = [50] if most == HELD else [50] * most
        yield pb.ExecuteResponse(tokens=pb.ExecuteResponse.Tokens(token_ids=tokens, kernel_path="null"))
        if most == HELD:
            await asyncio.Event().wait()
        usage = types_pb2.Usage(prompt_token_count=len(request.prompt_token_ids), completion_token_count=most)
        yield pb.ExecuteResponse(
            finished=pb.ExecuteResponse.Finished(
                finish_reason=types_pb2.FINISH_REASON_LENGTH, usage=usage, kernel_path="null"
            )
        )


async def serve(folder: Path, name: str, port: int, base_id: str) -> None:
    """Serves until the process is ended."""
    server = grpc.aio.server()
    stubs.add_ExecutorServiceServicer_to_server(NullExecutor(name, base_id), server)
    pair = ((folder / "peer.key").read_bytes(), (folder / "peer.pem").read_bytes())
    server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
