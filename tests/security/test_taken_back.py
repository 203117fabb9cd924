"""A revision that was revoked is shown as ACTIVE again: by a hand on the registry's database, and by whoever answers
`Watch` in the registry's place. Router, loader and executor do not fall for either."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import create_engine, text

from loraport.bundle.digest import sha256_digest
from loraport.loader.v1 import loader_service_pb2 as loader_pb
from loraport.log.leaf import Kind
from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import log_service_pb2 as log_pb
from services.executor.registry_client import RegistryClient as OfExecutor
from services.loader.registry_client import RegistryClient as OfLoader
from services.loader.resolve import Resolver
from services.registry.store import log as translog
from services.registry.store.database import Database
from services.router.catalog_view import RecordChecker, Target, resolve
from services.shared.catalog_client import CatalogClient
from services.shared.checkpoint import CheckpointKeeper, CheckpointPolicy, checkpoint_keys, prove_by
from services.shared.clock import SystemClock
from services.shared.errors import LoraportError
from tests import loader_rig
from tests.contract import executor_rig
from tests.contract.registry_rig import REGISTRY_KEY, TIMEOUT, Rig, serving, write_config
from tests.loader_rig import reason, until
from tests.support.roots import trusting
from tests.support.tiny import prompt_of

TRUSTED = {REGISTRY_KEY.key_id: REGISTRY_KEY.public_pem}
NAME = "tenants/acme/adapters/bot"
P = prompt_of(17)


class Peers:
    """What a router, a loader and an executor believe of one registry."""

    def __init__(self, rig: Rig) -> None:
        self.router = CatalogClient(rig.connect("router"), artefacts_only=False)
        self.checker = RecordChecker(TRUSTED, on_refused=lambda item, why: None)
        lane = rig.connect("executor")
        self.executor = OfExecutor(
            lane, keeper(lane), trusted=TRUSTED, on_gone=lambda items: None, on_root=lambda version, envelope: None
        )
        lane = rig.connect("loader")
        self.loader = OfLoader(lane, keeper(lane))
        self.resolver = Resolver(self.loader, TRUSTED)

    async def start(self) -> None:
        self.router.start()
        self.executor.start()
        self.loader.follow(lambda items: None)
        for client in (self.router, self.executor._catalog, self.loader._following):
            assert await client.wait_synced(TIMEOUT)

    async def stop(self) -> None:
        await asyncio.gather(self.router.stop(), self.executor.close(), self.loader.close())

    async def use(self, revision_id: str, tenant: str = "acme") -> dict[str, str]:
        """Returns with what each refuses a revision, empty where it would use it for `tenant`."""
        assert await self.router.catch_up(TIMEOUT)
        await self.router.wait_synced(TIMEOUT)
        view = self.router.view
        item = resolve(view, tenant, Target(revision_id=revision_id))
        seen = item is not None and self.checker.is_active(view, item)
        return {
            "router": "" if seen else "NOT_FOUND",
            "loader": await why(self._load(revision_id)),
            "executor": await why(self._stand(revision_id, tenant)),
        }

    async def _load(self, revision_id: str) -> None:
        await self.loader._following.catch_up(TIMEOUT)
        await self.resolver.resolve(revision_id)
        await self.loader.require_fresh()

    async def _stand(self, revision_id: str, tenant: str) -> None:
        await self.executor._catalog.catch_up(TIMEOUT)
        standing = await self.executor.standing(revision_id, tenant)
        if tenant not in (standing.record.tenant, *standing.shared_tenants):
            raise LoraportError("REVISION_NOT_ACTIVE")
        await self.executor.require_fresh()


def keeper(lane: grpc.aio.Channel) -> CheckpointKeeper:
    clock = SystemClock()
    trusted = checkpoint_keys(trusting(REGISTRY_KEY, clock=clock))
    return CheckpointKeeper(prove_by(lane), trusted=trusted, policy=CheckpointPolicy(), clock=clock)


async def why(work: Any) -> str:
    try:
        await work
    except LoraportError as error:
        return error.reason
    return ""


@asynccontextmanager
async def peers_of(rig: Rig) -> AsyncIterator[Peers]:
    peers = Peers(rig)
    await peers.start()
    try:
        yield peers
    finally:
        await peers.stop()


def hand(url: str, *statements: tuple[str, dict[str, Any]]) -> None:
    """Changes rows beside the registry, as one change of the catalog."""
    engine = create_engine(url)
    with engine.begin() as database:
        for statement, values in statements:
            database.execute(text(statement), values)
        database.execute(text("UPDATE catalog_state SET epoch = epoch + 1"))
    engine.dispose()


GOOD = {"router": "", "loader": "", "executor": ""}


@pytest.mark.parametrize("again", [False, True], ids=["row", "row and leaf"])
async def test_a_row_that_is_set_back_to_active(url: str, tmp_path: Path, again: bool) -> None:
    async with serving(write_config(tmp_path, database_url=url)) as rig, peers_of(rig) as peers:
        await rig.base()
        await rig.tenant("acme")
        one = await rig.active("acme", "bot", 1, "one")
        assert await peers.use(one.revision_id) == GOOD
        gone = await rig.revoke(one.name)
        assert gone.record_envelope == b"", "what does not serve has no record to be shown"
        refused = {"router": "NOT_FOUND", "loader": "REVISION_NOT_ACTIVE", "executor": "REVISION_NOT_ACTIVE"}
        assert await peers.use(one.revision_id) == refused
        place = await place_of(rig, one)
        if again:
            place = append(url, Kind.RECORD, one.name, sha256_digest(one.record_envelope))
        back = (
            "UPDATE revisions SET state = 'ACTIVE', record_envelope = :record, record_leaf = :leaf,"
            " epoch = (SELECT epoch + 1 FROM catalog_state) WHERE revision_id = :id"
        )
        hand(url, (back, {"record": one.record_envelope, "leaf": place, "id": one.revision_id}))
        shown = await rig.adapters().GetRevision(adapter_pb.GetRevisionRequest(name=one.name), timeout=TIMEOUT)
        assert shown.state == adapter_pb.Revision.STATE_ACTIVE, "the registry itself is led to believe it"
        assert await peers.use(one.revision_id) == refused
        # Nor does one that begins now, and never saw it revoked.
        async with peers_of(rig) as others:
            assert await others.use(one.revision_id) == refused


async def test_tenants_that_are_written_into_a_row(url: str, tmp_path: Path) -> None:
    async with serving(write_config(tmp_path, database_url=url)) as rig, peers_of(rig) as peers:
        await rig.base()
        for tenant in ("acme", "globex", "mallory"):
            await rig.tenant(tenant)
        one = await rig.active("acme", "bot", 1, "one")
        share = adapter_pb.ShareAdapterRequest(name=NAME, shared_tenants=["tenants/globex"])
        await rig.adapters().ShareAdapter(share, timeout=TIMEOUT)
        for tenant in ("acme", "globex"):
            assert await peers.use(one.revision_id, tenant) == GOOD
        hand(
            url,
            ("UPDATE adapters SET shared_tenants = :who", {"who": '["globex", "mallory"]'}),
            ("UPDATE revisions SET epoch = (SELECT epoch + 1 FROM catalog_state)", {}),
        )
        assert await peers.use(one.revision_id, "acme") == GOOD
        found = await peers.use(one.revision_id, "mallory")
        assert (found["router"], found["executor"]) == ("NOT_FOUND", "REVISION_NOT_ACTIVE")


async def place_of(rig: Rig, revision: adapter_pb.Revision) -> int:
    leaves = await rig.log("admin").ListLeaves(log_pb.ListLeavesRequest(page_size=500), timeout=TIMEOUT)
    digest = sha256_digest(revision.record_envelope).encode()
    return next(leaf.index for leaf in leaves.leaves if digest in leaf.body)


def append(url: str, kind: Kind, resource: str, digest: str) -> int:
    """Appends a leaf beside the registry, as well as the registry itself could."""
    database = Database(url)
    with database.write() as transaction:
        place = translog.append(transaction, kind, resource=resource, digest=digest, now_us=1)
    database.close()
    return place


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not come is not waited for."""
    monkeypatch.setattr("services.shared.inclusion.ARRIVAL_S", 0.05)
    monkeypatch.setattr("services.shared.checkpoint.FIRST_S", 0.05)


async def test_a_loader_whose_watch_leaves_out_what_was_taken_back(
    rig: loader_rig.Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = rig.registry
    one, two = await rig.admit(seed=91), await rig.admit(seed=92, adapter="other")
    registry.log.restrict(Kind.REVOKED, registry.revisions[one.revision_id].name)
    registry.withheld, honest = 0, registry.epoch + 1
    registry.checkpoint = lambda: registry.log.checkpoint(honest)
    registry.epoch = 2**52  # what it says of its epoch is signed by nobody
    await rig.activate(two)  # tells the followers, with the registry's honest checkpoint
    keeper = rig.service._registry._keeper
    await until(lambda: keeper._refused == "INCOMPLETE")
    keeper.newest = None  # as if the one from before had expired
    impatient(monkeypatch)
    for bundle in (one, two):
        call = rig.executor("executor-0").EnsureHost(
            loader_pb.EnsureHostRequest(revision_id=bundle.revision_id), timeout=60
        )
        assert await reason(call) == "CHECKPOINT_STALE"
    monkeypatch.undo()
    registry.withheld = None
    await rig.activate(two)
    await until(lambda: keeper.newest is not None)
    await rig.ensure(two)
    call = rig.executor("executor-0").EnsureHost(loader_pb.EnsureHostRequest(revision_id=one.revision_id), timeout=60)
    assert await reason(call) == "REVISION_NOT_ACTIVE"


async def test_an_executor_whose_watch_leaves_out_what_was_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor_rig.two_adapters(tmp_path)
    peers = executor_rig.Peers()
    one, two = peers.publish_two(tmp_path)
    peers.log.restrict(Kind.REVOKED, "tenants/acme/adapters/one/revisions/v1")
    peers.withheld = 0
    async with executor_rig.running(tmp_path, tmp_path / "base", peers) as rig:
        await until(lambda: rig.service._registry._keeper._refused == "INCOMPLETE")
        impatient(monkeypatch)
        assert await reason(rig.call(P, one)) == "CHECKPOINT_STALE"
        assert peers.served == {}, "the loader was not even asked"
        monkeypatch.undo()
        peers.withheld = None
        await peers.tell()
        await until(lambda: rig.service._registry.seen() is not None)
        assert await reason(rig.call(P, one)) == "REVISION_NOT_ACTIVE"
        assert (await rig.answer(P, two)).tokens[0]
