"""Giving up waiting for a server must not break its shutdown."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraport.dev.pki import make_ca, make_leaf
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server


async def test_a_cancelled_wait_leaves_the_drain_whole() -> None:
    ca = make_ca("service")
    certificate, key = make_leaf(ca, uri="spiffe://loraport.local/service/registry")
    server = Server(CertificateAuthorities({"service": ca[0], "admin": make_ca("admin")[0]}))
    port = server.listen("127.0.0.1:0", key=key, certificate=certificate, clients=False)
    await server.start()
    waiting = asyncio.create_task(server.wait())
    credentials = grpc.ssl_channel_credentials(ca[0])
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        # A stream at the door makes the shutdown take its grace.
        stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await stream.read()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await server.stop(0.2)
    await asyncio.wait_for(server.wait(), 60)
