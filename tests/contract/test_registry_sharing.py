"""An adapter that its owner shares: who hears of it, what stays hidden, and what the log keeps."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraport.bundle.canonical import canonical
from loraport.bundle.digest import sha256_digest
from loraport.log.leaf import Kind, parse_leaf
from loraport.registry.v1 import adapter_service_pb2 as pb
from loraport.registry.v1 import audit_service_pb2 as audit_pb
from loraport.registry.v1 import log_service_pb2 as log_pb
from services.router.catalog_view import Target, resolve
from services.shared.catalog_client import CatalogClient
from tests.contract.registry_rig import TIMEOUT, Rig, reason_of, serving, write_config

NAME = "tenants/acme/adapters/pirate"


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        await rig.base()
        for tenant in ("acme", "globex", "initech"):
            await rig.tenant(tenant)
        yield rig


async def share(rig: Rig, *tenants: str, name: str = NAME, **options: str) -> pb.Adapter:
    request = pb.ShareAdapterRequest(name=name, shared_tenants=[f"tenants/{tenant}" for tenant in tenants], **options)
    return await rig.adapters().ShareAdapter(request, timeout=TIMEOUT)


async def test_sharing_opens_an_adapter_to_those_named_and_taking_it_back_closes_it(rig: Rig) -> None:
    one = await rig.active("acme", "pirate", 1, "one")
    await rig.alias(f"{NAME}/aliases/prod", one.revision_id)
    client = CatalogClient(rig.channel("router"), artefacts_only=False)
    client.start()
    assert await client.wait_synced(TIMEOUT)

    async def seen() -> dict[str, bool]:
        assert await client.catch_up(TIMEOUT)
        return {
            tenant: resolve(client.view, tenant, Target(adapter=NAME)) is not None
            for tenant in ("acme", "globex", "initech")
        }

    assert await seen() == {"acme": True, "globex": False, "initech": False}
    assert (await share(rig, "globex")).shared_tenants == ["tenants/globex"]
    assert await seen() == {"acme": True, "globex": True, "initech": False}
    # A later version is shared as well, once it may serve.
    two = await rig.active("acme", "pirate", 2, "two")
    await rig.alias(f"{NAME}/aliases/prod", two.revision_id, now=True, reason="newer", force=True)
    assert await seen() == {"acme": True, "globex": True, "initech": False}
    await share(rig, "initech")
    assert await seen() == {"acme": True, "globex": False, "initech": True}
    await rig.revoke(two.name)
    assert await seen() == {"acme": True, "globex": False, "initech": False}
    assert list((await share(rig)).shared_tenants) == []
    await client.stop()


async def test_sharing_is_a_leaf_and_an_event_and_repeating_it_is_not(rig: Rig) -> None:
    await rig.active("acme", "pirate", 1, "one")
    await share(rig, "initech", "globex", "globex")
    await share(rig, "globex", "initech")
    leaves = await rig.log("admin").ListLeaves(log_pb.ListLeavesRequest(page_size=500), timeout=TIMEOUT)
    shared = [leaf for leaf in map(parse_leaf, (leaf.body for leaf in leaves.leaves)) if leaf.kind == Kind.SHARED]
    assert [(leaf.resource, leaf.digest) for leaf in shared] == [
        (NAME, sha256_digest(canonical(["globex", "initech"])))
    ]
    events = await rig.audit().ListAuditEvents(audit_pb.ListAuditEventsRequest(page_size=2), timeout=TIMEOUT)
    assert [(event.resource, event.reason) for event in events.events] == [(NAME, ""), (NAME, "with globex, initech")]


@pytest.mark.parametrize(
    ("tenants", "name", "reason"),
    [
        (["nobody"], NAME, "TENANT_NOT_FOUND"),
        (["globex", "nobody"], NAME, "TENANT_NOT_FOUND"),
        (["acme"], NAME, "INVALID_REQUEST"),
        (["Globex"], NAME, "INVALID_NAME"),
        (["globex"], "tenants/acme/adapters/parrot", "ADAPTER_NOT_FOUND"),
        (["globex"], "pirate", "INVALID_NAME"),
    ],
)
async def test_what_is_refused_changes_nothing(rig: Rig, tenants: list[str], name: str, reason: str) -> None:
    await rig.active("acme", "pirate", 1, "one")
    await share(rig, "initech")
    assert await reason_of(share(rig, *tenants, name=name)) == reason
    found = await rig.adapters().GetAdapter(pb.GetAdapterRequest(name=NAME), timeout=TIMEOUT)
    assert found.shared_tenants == ["tenants/initech"]


async def test_only_an_admin_shares(rig: Rig) -> None:
    request = pb.ShareAdapterRequest(name=NAME)
    assert await reason_of(rig.adapters("router").ShareAdapter(request, timeout=TIMEOUT)) == "NOT_ALLOWED"
