"""A load outlives one broken connection, and only one."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from loraport.loader.v1 import loader_service_pb2 as pb
from services.executor.loader_client import LoaderClient
from services.shared.errors import LoraportError
from services.shared.rpc.status import trailing_metadata


class Loader:
    """Fails as told, then gives a lease and its two bytes."""

    def __init__(self, *failures: AioRpcError) -> None:
        self.failures = list(failures)

    async def EnsureHost(self, request: object, timeout: float, metadata: object = None):
        if self.failures:
            raise self.failures.pop(0)
        yield pb.EnsureHostResponse(lease=pb.HostLease(lease_id="1", size_bytes=2))

    async def ReadBlob(self, request: object, timeout: float, metadata: object = None):
        yield pb.ReadBlobResponse(data=b"ok")

    async def ReleaseHost(self, request: object, timeout: float, metadata: object = None) -> pb.ReleaseHostResponse:
        return pb.ReleaseHostResponse()


BROKEN = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata())
REFUSED = AioRpcError(
    grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(*trailing_metadata(LoraportError("STORE_UNAVAILABLE")))
)


def client(*failures: AioRpcError) -> LoaderClient:
    made = LoaderClient(grpc.aio.insecure_channel("127.0.0.1:1"), timeout_s=5)
    made._stub = Loader(*failures)
    return made


async def test_a_broken_connection_is_tried_again() -> None:
    host = await client(BROKEN).fetch("r", size_bytes=2, on_stage=lambda stage: None)
    assert bytes(host.data) == b"ok"


@pytest.mark.parametrize(
    ("failures", "reason"), [((BROKEN, BROKEN), "LOADER_UNAVAILABLE"), ((REFUSED,), "STORE_UNAVAILABLE")]
)
async def test_a_loader_that_is_away_or_refuses_is_an_error(failures: tuple[AioRpcError, ...], reason: str) -> None:
    with pytest.raises(LoraportError) as caught:
        await client(*failures).fetch("r", size_bytes=2, on_stage=lambda stage: None)
    assert caught.value.reason == reason
