"""The registry as a process: ready by health, drains on SIGTERM with a watcher at the door."""

import asyncio
import dataclasses
import json
import signal
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraport.registry.v1 import catalog_service_pb2, catalog_service_pb2_grpc
from tests.architecture.source import ROOT
from tests.contract.registry_rig import LEAVES, SERVICE_CA, TIMEOUT, info_of, write_config
from tests.support.ports import free_port


async def test_it_serves_and_drains(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    path = tmp_path / "registry.json"
    path.write_text(json.dumps(dataclasses.asdict(write_config(tmp_path, listen=address))))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.registry", "--config", str(path), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    certificate, key = LEAVES["router"]
    credentials = grpc.ssl_channel_credentials(SERVICE_CA.certificate, key, certificate)
    try:
        async with grpc.aio.secure_channel(address, credentials) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            answer = await health.Check(request, timeout=TIMEOUT, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = catalog_service_pb2_grpc.CatalogServiceStub(channel)
            stream = stub.Watch(catalog_service_pb2.WatchRequest())
            while not (await stream.read()).synced:
                pass
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert info_of(caught.value).reason == "DRAINING"
        _, errors = await asyncio.wait_for(process.communicate(), TIMEOUT)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    for line in errors.decode().splitlines():
        assert json.loads(line)["service"] == "registry"
