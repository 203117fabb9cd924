"""A record that is signed and not logged is not used: what proves it, what does not, and how often is asked."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loraport.bundle.envelope import SigningKey
from loraport.log.leaf import FIRST, Kind, Leaf, parse_leaf
from services.shared.catalog import RevisionItem
from services.shared.checkpoint import CheckpointKeeper, CheckpointPolicy, checkpoint_keys
from services.shared.clock import ManualClock
from services.shared.errors import LoraportError
from services.shared.inclusion import RecordProofs
from tests.support.roots import trusting
from tests.support.translog import FakeLog

KEY = SigningKey.generate()


class World:
    """A registry's log behind the port, and a peer that hears of its checkpoints when told to."""

    def __init__(self, path: Path) -> None:
        self.log = FakeLog(KEY)
        self.clock = ManualClock()
        self.keeper = CheckpointKeeper(
            self._consistency,
            trusted=checkpoint_keys(trusting(KEY, clock=self.clock)),
            policy=CheckpointPolicy(state_file=str(path)),
            clock=self.clock,
        )
        self.proofs = RecordProofs(self, self.keeper)
        self.renewed = 0
        self.answer: Callable[[bytes, list[bytes]], tuple[bytes, list[bytes]]] = lambda body, proof: (body, proof)
        self.on_renew: Callable[[], Awaitable[None]] = self.tell

    def item(self, adapter: str = "pirate", *, logged: bool = True, version: int = 1) -> RevisionItem:
        record = f"record of {adapter} v{version}".encode()
        name = f"tenants/acme/adapters/{adapter}/revisions/v{version}"
        leaf = self.log.record(name, record) if logged else 0
        return RevisionItem(
            revision_id=f"id of {adapter} {version}", tenant="acme", adapter=adapter, version=version, state="ACTIVE",
            base_model="b", weights_digest="d", size_bytes=1, max_rank=1, record_envelope=record,
            shared_tenants=frozenset(), record_leaf=leaf,
        )  # fmt: skip

    async def tell(self, log: FakeLog | None = None) -> None:
        """A checkpoint arrives with the catalog."""
        self.keeper.offer((log or self.log).checkpoint(1, now=self.clock.now()), (log or self.log).as_list())
        assert self.keeper._task is not None
        await self.keeper._task

    async def use(self, item: RevisionItem) -> str:
        try:
            await self.proofs.require_logged(item)
        except LoraportError as error:
            return error.reason
        return ""

    async def _consistency(self, old: int, new: int) -> Sequence[bytes]:
        return self.log.prove(old, new)

    async def newest_size(self) -> int:
        await self.log._answering()
        await asyncio.sleep(0.01)
        self.renewed += 1
        size = self.log.size
        await self.on_renew()
        return size

    async def inclusion(self, index: int, tree_size: int) -> tuple[bytes, Sequence[bytes]]:
        await self.log._answering()
        return self.answer(*self.log.inclusion(index, tree_size))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("services.shared.inclusion.ARRIVAL_S", 0.05)
    return World(tmp_path / "floor.json")


async def test_a_logged_record_is_proven_once_and_for_all(world: World) -> None:
    item = world.item()
    await world.tell()
    assert await world.use(item) == ""
    world.log.grow(5)
    await world.tell()
    world.log.dead = 100
    assert await world.use(replace(item, shared_tenants=frozenset({"globex"}))) == ""
    assert (world.log.asked, world.renewed) == (1, 0)


async def test_what_the_registry_signed_and_never_logged_is_refused(world: World) -> None:
    ghost = world.item("ghost", logged=False)
    pirate, other = world.item("pirate"), world.item("pirate", version=2)
    world.log.grow(3)
    await world.tell()
    last = world.log.size - 1
    wrong = [
        ghost,  # leaf 0, which is nobody's record
        *(replace(ghost, record_leaf=index) for index in (pirate.record_leaf, last, -1, 10**9)),
        replace(pirate, record_leaf=other.record_leaf),  # the right adapter, another version's leaf
        replace(pirate, record_envelope=other.record_envelope),  # the right name, another record
        replace(pirate, tenant="globex"),
    ]
    for item in wrong:
        assert await world.use(item) == "RECORD_NOT_LOGGED", item
    assert await world.use(pirate) == "", "a lie about one says nothing about another"


async def test_a_proof_of_something_else_is_no_proof(world: World) -> None:
    item, other = world.item("pirate"), world.item("terse")
    await world.tell()
    size = world.log.size
    body, proof = world.log.inclusion(item.record_leaf, size)
    fresh = Leaf(
        index=item.record_leaf, time=2, kind=Kind.RECORD, resource="tenants/acme/adapters/pirate/revisions/v1",
        digest=parse_leaf(body).digest, previous=FIRST,
    ).body()  # fmt: skip
    lies = [
        world.log.inclusion(other.record_leaf, size),
        (body, world.log.inclusion(other.record_leaf, size)[1]),
        (fresh, proof),  # this record in a leaf that the tree does not have
        (body, proof[:-1]),
        (body, [*proof, proof[0]]),
        (body, [bytes(32), *proof[1:]]),
        (body, [b"short"]),
        (b"", proof),
        (b"{}", proof),
    ]
    for lie in lies:
        world.answer = lambda *_, lie=lie: lie
        assert await world.use(item) == "RECORD_NOT_LOGGED", lie
    world.answer = lambda *truth: truth
    assert await world.use(item) == ""


async def test_a_proven_record_is_proven_for_its_place_only(world: World) -> None:
    """Up to a leaf a leaked key counts, so a registry that lies would show what the key signed later as being before."""
    world.item("earlier")
    item = world.item()
    await world.tell()
    assert await world.use(item) == ""
    moved = replace(item, record_leaf=item.record_leaf - 1)
    assert await world.use(moved) == "RECORD_NOT_LOGGED"
    other = world.item("other")
    await world.tell()
    lie = replace(other, record_leaf=item.record_leaf)
    assert await asyncio.gather(world.use(other), world.use(lie)) == ["", "RECORD_NOT_LOGGED"]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.RECORD])
async def test_a_logged_leaf_of_another_kind_is_no_record(world: World, kind: Kind) -> None:
    """The same name and digest at the place that the catalog names, truly in the tree: an announcement approves nothing."""
    item = world.item(logged=False)
    name = "tenants/acme/adapters/pirate/revisions/v1"
    item = replace(item, record_leaf=world.log.record(name, item.record_envelope, kind=kind))
    await world.tell()
    assert await world.use(item) == "RECORD_NOT_LOGGED"
    assert await world.use(replace(item, record_leaf=world.log.record(name, item.record_envelope))) == ""


async def test_a_leaf_of_another_place_is_not_the_one_that_the_catalog_names(world: World) -> None:
    """The same record is in the log twice; each leaf proves its own place only."""
    first, second = world.item(), world.item()
    assert first.record_leaf != second.record_leaf
    await world.tell()
    of_second = world.log.inclusion(second.record_leaf, world.log.size)
    world.answer = lambda *_: of_second
    assert await world.use(first) == "RECORD_NOT_LOGGED"
    assert await world.use(second) == ""


async def test_a_record_of_a_second_history_is_refused(world: World) -> None:
    item = world.item()
    await world.tell()
    world.log = FakeLog(KEY, history="other")
    assert world.item() == item, "the same record at the same place"
    world.log.grow(1)
    assert await world.use(item) == "RECORD_NOT_LOGGED"
    younger = world.item("younger")
    assert await world.use(younger) == "LOG_SPLIT_VIEW"


async def test_a_younger_record_has_a_checkpoint_made(world: World) -> None:
    await world.tell()
    item = world.item()
    assert await world.use(item) == ""
    assert (world.renewed, world.log.inclusions) == (1, 1)


async def test_without_a_checkpoint_that_could_prove_it_nothing_is_used(world: World) -> None:
    async def nothing() -> None:
        """The registry says that it has issued one, and it never comes."""

    await world.tell()
    item = world.item()
    world.on_renew = nothing
    assert await world.use(item) == "CHECKPOINT_STALE"
    world.on_renew = world.tell
    assert await world.use(item) == "", "a failure is not remembered"


async def test_a_dead_log_service_is_said_so_and_asked_again_by_the_next(world: World) -> None:
    item = world.item()
    await world.tell()
    world.log.dead = 1
    with pytest.raises(LoraportError) as caught:
        await world.proofs.require_logged(item)
    assert (caught.value.reason, caught.value.retry_after_s) == ("REGISTRY_UNAVAILABLE", 1.0)
    assert await world.use(item) == ""


async def test_a_batch_asks_for_few_checkpoints_and_once_for_each_record(world: World) -> None:
    await world.tell()
    items = [world.item(f"a{number}") for number in range(30)]
    assert await asyncio.gather(*(world.use(item) for item in items for _ in range(3))) == [""] * 90
    assert world.log.inclusions == 30
    assert world.renewed <= 2
    assert not world.proofs._asking
    assert not world.proofs._renewals


async def test_a_question_under_way_is_not_an_answer_about_what_came_after_it(world: World) -> None:
    await world.tell()
    first = world.item("first")
    begun, go = asyncio.Event(), asyncio.Event()
    size = world.log.size
    ask = world.newest_size

    async def held() -> int:
        begun.set()
        await go.wait()
        world.newest_size = ask  # type: ignore[method-assign]
        return size

    world.newest_size = held  # type: ignore[method-assign]
    one = asyncio.create_task(world.use(first))
    await begun.wait()
    second = world.item("second")
    two = asyncio.create_task(world.use(second))
    await asyncio.sleep(0.01)
    go.set()
    assert await two == ""
    assert await one in ("", "CHECKPOINT_STALE")


async def test_a_caller_that_leaves_takes_no_answer_from_the_others(world: World) -> None:
    await world.tell()
    item = world.item()
    one, two = asyncio.create_task(world.use(item)), asyncio.create_task(world.use(item))
    await asyncio.sleep(0)
    one.cancel()
    assert await two == ""
