"""`python -m services.loader`: starts from a file, drains on SIGTERM, and says in one line what it cannot use."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.loader_rig import ROOT, loader_config, running
from tests.support.ports import free_port


def start(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.loader", "--config", str(path)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def write(tmp_path: Path, **settings: Any) -> Path:
    config = dataclasses.asdict(loader_config(tmp_path, free_port(), "127.0.0.1:1"))
    path = tmp_path / "loader.json"
    path.write_text(json.dumps({**config, **settings}))
    return path


async def test_a_process_serves_and_drains(tmp_path: Path) -> None:
    """Registry and store are not there: it starts all the same and says so call by call."""
    async with running(tmp_path, "127.0.0.1:1", tmp_path):
        pass  # leaves certificates, keys and trust behind
    port = free_port()
    process = start(write(tmp_path, listen=f"127.0.0.1:{port}", upload_listen=f"127.0.0.1:{free_port()}"))
    try:
        channel = grpc.secure_channel(
            f"127.0.0.1:{port}",
            grpc.ssl_channel_credentials(
                *((tmp_path / name).read_bytes() for name in ("ca.pem", "registry.key", "registry.pem"))
            ),
        )
        with channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"signing_key": "nowhere"}, "nowhere"),
        ({"trust_dir": "nowhere"}, "nowhere"),
        ({"s3_credentials": "nowhere"}, "nowhere"),
        ({"name": "../x"}, "name"),
        ({"surprise": 1}, "surprise"),
        ({"listen": "256.0.0.1:1"}, "cannot listen"),
    ],
)
async def test_what_cannot_be_used_is_one_line_and_exit_code_2(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    async with running(tmp_path, "127.0.0.1:1", tmp_path):
        pass
    process = start(write(tmp_path, **settings))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    lines = [line for line in errors.splitlines() if line.startswith("loader: ")]
    assert len(lines) == 1, errors
    assert words in lines[0]
    assert "Traceback" not in errors
