"""Audit events on both databases: a chain that only grows, and what the door refuses."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from loraport.cli.audit import _event
from loraport.log.events import verify_chain
from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import audit_service_pb2 as pb
from loraport.registry.v1 import tenant_service_pb2 as tenant_pb
from services.registry.refusals import PER_WINDOW
from services.registry.servicers import convert
from services.registry.store import journal
from services.registry.store.database import Database
from services.registry.store.migrate import upgrade
from tests.contract.registry_rig import TIMEOUT, Rig, reason_of, serving, write_config


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        await rig.base()
        await rig.tenant("acme")
        yield rig


async def events(rig: Rig) -> list[pb.AuditEvent]:
    """All events, oldest first."""
    page = await rig.audit().ListAuditEvents(pb.ListAuditEventsRequest(page_size=500), timeout=TIMEOUT)
    assert not page.next_page_token
    return list(reversed(page.events))


async def test_events_are_a_chain(rig: Rig) -> None:
    one = await rig.active("acme", "pirate", 1, "one")
    assert await reason_of(rig.approve(one.name, etag="e0")) == "STALE_ETAG"
    await asyncio.gather(*(rig.tenant(f"other-{number}") for number in range(5)))
    found = await events(rig)
    chain = verify_chain((_event(item), item.hash) for item in found)
    assert (chain.fault, chain.count) == ("", len(found))
    assert [item.sequence for item in found] == list(range(1, len(found) + 1))


async def test_the_database_refuses_to_change_events(rig: Rig) -> None:
    database = rig.service._database
    changes = ["UPDATE audit_events SET reason = 'x'", "DELETE FROM audit_events WHERE sequence = 1"]
    if database.engine.dialect.name == "postgresql":
        changes.append("TRUNCATE audit_events")
    for change in changes:
        with pytest.raises(DBAPIError, match="append-only"), database.exclusive() as connection:
            connection.execute(text(change))
    assert not verify_chain((_event(item), item.hash) for item in await events(rig)).fault


def test_events_of_an_earlier_release_get_their_hashes(url: str) -> None:
    database = Database(url)
    upgrade(database, to="0002")
    old = """INSERT INTO audit_events (sequence, event_us, principal, method, tenant, resource, decision, reason,
        request_id) VALUES (:sequence, 5, 'p', '/m', '', 'r', 'allowed', '', '')"""
    with database.exclusive() as connection:
        # A write that was rolled back has left a gap.
        connection.execute(text(old), [{"sequence": 1}, {"sequence": 2}, {"sequence": 5}])
    upgrade(database)
    with database.write() as transaction:
        journal.add_event(
            transaction, now_us=7, principal="p", method="/m", resource="", decision="allowed", reason="", request_id=""
        )
    with database.read() as connection:
        rows = journal.list_events(connection, "", after=None, limit=10)
    chain = verify_chain((_event(convert.audit_event(row)), row.hash) for row in reversed(rows))
    assert (chain.fault, chain.count) == ("", 4)
    database.close()


async def test_refused_calls_are_kept_up_to_a_bound_and_then_counted(rig: Rig) -> None:
    before = len(await events(rig))
    request = tenant_pb.CreateTenantRequest(tenant_id="globex")
    for _ in range(PER_WINDOW + 3):
        assert await reason_of(rig.tenants("router").CreateTenant(request, timeout=TIMEOUT)) == "NOT_ALLOWED"
    assert await reason_of(rig.tenants().CreateTenant(request)) == "DEADLINE_REQUIRED"
    async with asyncio.timeout(TIMEOUT):
        while len(found := (await events(rig))[before:]) < PER_WINDOW + 1:
            await asyncio.sleep(0.02)
    router = "spiffe://loraport.local/service/router"
    said = sorted((item.principal, item.decision, item.reason) for item in found)
    assert said == [
        ("spiffe://loraport.local/admin/ops", "refused", "DEADLINE_REQUIRED"),
        *[(router, "refused", "NOT_ALLOWED")] * PER_WINDOW,
    ]
    assert all(item.method.endswith("/CreateTenant") and item.request_id for item in found)
    # What was left out is written at the latest when the registry ends.
    await rig.service.stop()
    with rig.service._database.read() as connection:
        last = connection.execute(text("SELECT principal, reason FROM audit_events ORDER BY sequence DESC")).first()
    assert last == (router, "3 more refused calls")


async def test_what_a_service_asks_for_in_vain_is_kept_up_to_a_bound_and_what_an_operator_does_always(rig: Rig) -> None:
    before = len(await events(rig))
    asked = adapter_pb.AdmitRevisionRequest(verification_envelope=b"{}")
    for _ in range(PER_WINDOW + 3):
        call = rig.adapters("loader").AdmitRevision(asked, timeout=TIMEOUT)
        assert await reason_of(call) == "INVALID_VERIFICATION"
    again = tenant_pb.CreateTenantRequest(tenant_id="acme")
    for _ in range(PER_WINDOW + 3):
        assert await reason_of(rig.tenants().CreateTenant(again, timeout=TIMEOUT)) == "TENANT_EXISTS"
    said = Counter((item.principal.rpartition("/")[2], item.reason) for item in (await events(rig))[before:])
    assert said == {("loader", "INVALID_VERIFICATION"): PER_WINDOW, ("ops", "TENANT_EXISTS"): PER_WINDOW + 3}
    await rig.service.stop()
    with rig.service._database.read() as connection:
        last = connection.execute(text("SELECT principal, reason FROM audit_events ORDER BY sequence DESC")).first()
    assert last == ("spiffe://loraport.local/service/loader", "3 more refused calls")


async def test_what_one_caller_is_refused_at_the_door_and_behind_it_has_one_bound(rig: Rig) -> None:
    before = len(await events(rig))
    wanted, asked = tenant_pb.CreateTenantRequest(tenant_id="globex"), adapter_pb.AdmitRevisionRequest()
    half = PER_WINDOW // 2
    for _ in range(half):
        assert await reason_of(rig.tenants("loader").CreateTenant(wanted, timeout=TIMEOUT)) == "NOT_ALLOWED"
    for _ in range(PER_WINDOW):
        assert await reason_of(rig.adapters("loader").AdmitRevision(asked, timeout=TIMEOUT)) == "INVALID_VERIFICATION"
    await rig.service.stop()  # what the door noted is written by then
    with rig.service._database.read() as connection:
        rows = connection.execute(text("SELECT reason FROM audit_events ORDER BY sequence")).scalars().all()
    left_out = f"{half} more refused calls"
    assert Counter(rows[before:]) == {"NOT_ALLOWED": half, "INVALID_VERIFICATION": PER_WINDOW - half, left_out: 1}
