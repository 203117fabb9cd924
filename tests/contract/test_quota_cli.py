"""`loraport tenant show`, `tenant set-quota` and `key rotate` against a real registry, and a router that is not there."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loraport.cli.main import run
from loraport.cli.quotas import QUOTAS, _quota_rows
from loraport.dev.layout import ENDPOINTS_SCHEMA
from loraport.registry.v1.tenant_service_pb2 import Tenant
from loraport.router.v1.router_admin_service_pb2 import QuotaUsage
from services.router.quota import Quotas
from services.shared.quotas import NAMES, Quota
from tests.contract.registry_rig import LEAVES, serving, write_config

Cli = Callable[..., Awaitable[tuple[int, Any]]]


@pytest.fixture
async def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Cli]:
    """Runs a command and gives its exit code with its JSON, or what it said on stderr."""
    async with serving(write_config(tmp_path)) as rig:
        (tmp_path / "admin.pem").write_bytes(LEAVES["admin"][0])
        (tmp_path / "admin.key").write_bytes(LEAVES["admin"][1])
        endpoints = {
            "schema": ENDPOINTS_SCHEMA,
            **dict.fromkeys(("registry", "router_admin", "loader_upload"), rig.address),
            "credentials": {"ca": "ca.pem", "admin_certificate": "admin.pem", "admin_key": "admin.key"},
        }
        (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))

        async def call(*words: str) -> tuple[int, Any]:
            capsys.readouterr()
            code = await asyncio.to_thread(run, [*words, "--data", str(tmp_path), "--json"])
            out, err = capsys.readouterr()
            return code, json.loads(out[out.find("{\n") :]) if code == 0 else err

        yield call


async def test_quotas_are_set_kept_and_taken_away(cli: Cli) -> None:
    await cli("tenant", "create", "acme")
    code, made = await cli("tenant", "set-quota", "acme", "--requests-per-minute", "600", "--adapter-count", "0")
    assert (code, made["quota"]) == (0, {"requests_per_minute": 600, "adapter_count": 0})
    # What is not named stays.
    made = (await cli("tenant", "set-quota", "acme", "--stored-bytes", "1000"))[1]
    assert made["quota"] == {"requests_per_minute": 600, "adapter_count": 0, "stored_bytes": 1000}
    made = (await cli("tenant", "set-quota", "acme", "--unlimited", "adapter-count", "--queued-count", "3"))[1]
    assert made["quota"] == {"requests_per_minute": 600, "queued_count": 3, "stored_bytes": 1000}
    shown = (await cli("tenant", "show", "acme"))[1]
    rows = {row["quota"]: row for row in shown["quotas"]}
    assert list(rows) == list(QUOTAS) == list(NAMES)
    assert (rows["stored_bytes"]["limit"], rows["stored_bytes"]["used"]) == (1000, 0)
    # No router answers here: that is said, and what the registry knows is shown.
    assert (rows["requests_per_minute"]["limit"], rows["requests_per_minute"]["used"]) == (600, None)
    assert (await cli("tenant", "set-quota", "acme", "--unlimited", "all"))[1]["quota"] == {}
    code, error = await cli("tenant", "set-quota", "nobody", "--queued-count", "1")
    assert (code, "TENANT_NOT_FOUND" in error) == (1, True)


async def test_a_key_is_rotated_into_its_file(cli: Cli, tmp_path: Path) -> None:
    await cli("tenant", "create", "acme")
    old = (await cli("key", "create", "--tenant", "acme"))[1]
    path = Path(old["path"])
    assert path.read_text().strip() == old["secret"]
    code, made = await cli("key", "rotate", old["key"], "--tenant", "acme", "--overlap-hours", "2")
    assert (code, made["replaced"]) == (0, old["key"])
    assert path.read_text().strip() == made["secret"] != old["secret"]
    assert path.stat().st_mode & 0o777 == 0o600
    code, error = await cli("key", "rotate", "0000000000", "--tenant", "acme")
    assert (code, "KEY_NOT_FOUND" in error) == (1, True)


def test_a_router_says_what_is_used() -> None:
    quota = Quota(requests_per_minute=5, adapter_count=2)
    quotas = Quotas(lambda: 0.0)
    quotas.enter("acme", quota)
    usage = QuotaUsage()
    for line in quotas.lines("acme", quota):
        usage.quotas.add(quota=line.quota, used=line.used, total=line.total, refused_count=line.refused)
    tenant = Tenant(quota=quota.given(), usage={"adapter_count": 1, "stored_bytes": 77})
    rows = {row["quota"]: (row["limit"], row["used"], row["total"]) for row in _quota_rows(tenant, usage)}
    assert rows["requests_per_minute"] == (5, 1, 1)
    assert rows["in_flight_count"] == (None, 1, 0)
    assert rows["adapter_count"] == (2, 1, None)
    assert rows["stored_bytes"] == (None, 77, None)
