"""What a peer believes of the registry: rollback, freeze, split view, and a floor that survives a restart."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest

from loraport.bundle.envelope import SigningKey
from loraport.log.checkpoint import Floor
from loraport.log.leaf import Kind
from loraport.trust.edit import next_root
from services.shared.catalog import CatalogView
from services.shared.checkpoint import CheckpointKeeper, CheckpointPolicy, checkpoint_keys
from services.shared.clock import ManualClock
from services.shared.config import ConfigError
from services.shared.errors import LoraportError
from services.shared.restraint import Restraint
from tests.support.roots import sealed, trusting
from tests.support.translog import FakeLog

KEY = SigningKey.generate()
GRACE = 900.0


class World:
    """A keeper with its clock and the log that it is told of."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.trust = trusting(KEY, clock=self.clock)
        self.log = FakeLog(KEY)
        self.path = path / "state" / "floor.json"
        self.epoch = 5
        self.down = 0
        self.keeper = self.restart()

    def restart(self) -> CheckpointKeeper:
        policy = CheckpointPolicy(state_file=str(self.path), grace_s=GRACE)
        self.keeper = self.keeper_of(policy)
        return self.keeper

    def keeper_of(self, policy: CheckpointPolicy) -> CheckpointKeeper:
        return CheckpointKeeper(self._prove, trusted=checkpoint_keys(self.trust), policy=policy, clock=self.clock)

    async def _prove(self, old: int, new: int) -> Sequence[bytes]:
        if self.down:
            self.down -= 1
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        return self.log.prove(old, new)

    def checkpoint(self, log: FakeLog | None = None, **changes: object) -> bytes:
        return (log or self.log).checkpoint(self.epoch, now=self.clock.now(), **changes)

    async def tell(self, envelope: bytes | None = None, *, listed: FakeLog | None = None) -> None:
        self.keeper.offer(envelope or self.checkpoint(), (self.log if listed is None else listed).as_list())
        assert self.keeper._task is not None
        await self.keeper._task

    def view(self, listed: FakeLog | None = None) -> CatalogView:
        return CatalogView(epoch=self.epoch, restraint=Restraint((listed or self.log).as_list()))

    async def load(self) -> str:
        """Returns the reason for which nothing may be loaded, empty when it may."""
        try:
            await self.keeper.require_fresh(lambda: self.view())
        except LoraportError as error:
            return error.reason
        return ""

    def serve(self) -> str:
        try:
            self.keeper.require_alive()
        except LoraportError as error:
            return error.reason
        return ""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("services.shared.checkpoint.FIRST_S", 0.02)
    monkeypatch.setattr("services.shared.checkpoint.RETRY_S", 0.01)
    return World(tmp_path)


async def test_nothing_is_loaded_before_the_first_checkpoint_and_a_load_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await world.load() == "CHECKPOINT_STALE"
    monkeypatch.setattr("services.shared.checkpoint.FIRST_S", 60)
    waiting = asyncio.create_task(world.load())
    await asyncio.sleep(0)
    await world.tell()
    assert await waiting == ""


async def test_a_frozen_checkpoint_goes_stale_then_dead(world: World) -> None:
    await world.tell()
    world.clock.advance(600)
    assert (await world.load(), world.serve()) == ("", "")
    world.clock.advance(1)
    assert (await world.load(), world.serve()) == ("CHECKPOINT_STALE", "")
    world.clock.advance(GRACE - 1)
    assert (await world.load(), world.serve()) == ("CHECKPOINT_STALE", "")
    world.clock.advance(1)
    assert (await world.load(), world.serve()) == ("CHECKPOINT_STALE", "CHECKPOINT_STALE")
    await world.tell()
    assert (await world.load(), world.serve()) == ("", "")


async def test_the_same_checkpoint_told_again_keeps_nothing_alive(world: World) -> None:
    frozen = world.checkpoint()
    await world.tell(frozen)
    world.clock.advance(601)
    await world.tell(frozen)
    assert await world.load() == "CHECKPOINT_STALE"


async def test_a_checkpoint_of_a_clock_that_was_set_back_is_held_no_longer_than_until_the_next(world: World) -> None:
    right = world.clock.now()
    world.clock.advance(3600)
    await world.tell()
    assert world.keeper.newest is not None
    ahead = world.keeper.newest
    world.clock = world.keeper._clock = ManualClock(right + 1)
    await world.tell()
    assert world.keeper.newest.issued == right + 1
    assert world.keeper.newest.expires < ahead.expires


async def test_a_log_that_grows_is_believed_once_it_is_proved(world: World) -> None:
    await world.tell()
    world.log.grow(4)
    world.down = 2
    await world.tell()
    assert world.log.proofs == 1
    assert world.keeper.floor.tree_size == 7
    assert await world.load() == ""


@pytest.mark.parametrize("what", ["tree_size", "catalog_epoch", "revocation_epoch"])
async def test_rollback_is_refused_by_its_name_also_after_a_restart(world: World, what: str) -> None:
    old = World(world.path.parent.parent / "old")
    old.clock = world.clock
    world.log.grow(2)
    world.log.revocation_epoch = 2
    world.epoch = 7
    await world.tell()
    older = world.checkpoint(old.log, revocation_epoch=2) if what == "tree_size" else world.checkpoint(**{what: 1})
    floor = world.keeper.floor
    await world.tell(older)
    assert world.keeper.floor == floor
    assert await world.load() == "", "what is known is still fresh"
    world.clock.advance(601)
    await world.tell(world.checkpoint(old.log, revocation_epoch=2) if what == "tree_size" else older)
    assert await world.load() == "CHECKPOINT_ROLLBACK"
    world.restart()
    assert world.keeper.floor == floor
    await world.tell(older)
    assert (await world.load(), world.serve()) == ("CHECKPOINT_ROLLBACK", "")
    await world.tell()
    assert await world.load() == ""


@pytest.mark.parametrize("grown", [0, 3])
async def test_two_histories_are_an_alarm_at_once(world: World, grown: int) -> None:
    await world.tell()
    true, floor = world.log, world.keeper.floor
    world.log = FakeLog(KEY, size=3 + grown, history="other")
    await world.tell()
    assert world.keeper.alarm
    assert world.keeper.floor == floor
    assert (await world.load(), world.serve()) == ("LOG_SPLIT_VIEW", "")
    world.log = true
    await world.tell()
    assert (await world.load(), world.keeper.alarm) == ("", "")


async def test_a_catalog_behind_its_checkpoint_loads_nothing(world: World) -> None:
    await world.tell()
    with pytest.raises(LoraportError, match="older than its checkpoint"):
        await world.keeper.require_fresh(lambda: CatalogView(epoch=world.epoch - 1))


async def test_a_checkpoint_is_not_believed_before_the_catalog_has_what_it_names(world: World) -> None:
    await world.tell()
    world.log.restrict(Kind.REVOKED, "tenants/acme/adapters/bot/revisions/v1")
    floor, empty = world.keeper.floor, FakeLog(KEY)
    await world.tell(listed=empty)
    assert world.keeper.floor == floor
    world.clock.advance(601)
    assert (await world.load(), world.serve()) == ("CHECKPOINT_STALE", "")
    await world.tell(listed=empty)
    world.clock.advance(GRACE)
    assert world.serve() == "CHECKPOINT_STALE", "what goes on withholding it keeps nothing alive"
    await world.tell()
    assert (await world.load(), world.serve()) == ("", "")
    assert world.keeper.floor.restriction_count == 1
    with pytest.raises(LoraportError, match="lacks restrictions"):
        await world.keeper.require_fresh(lambda: world.view(empty))
    other = FakeLog(KEY)
    other.restrict(Kind.REVOKED, "tenants/acme/adapters/bot/revisions/v2")
    with pytest.raises(LoraportError, match="lacks restrictions"):
        await world.keeper.require_fresh(lambda: world.view(other))


async def test_two_lists_of_what_was_taken_back_are_two_histories(world: World) -> None:
    world.log.restrict(Kind.REVOKED, "tenants/acme/adapters/bot/revisions/v1")
    await world.tell()
    other = FakeLog(KEY)
    for version in (2, 3):
        other.restrict(Kind.REVOKED, f"tenants/acme/adapters/bot/revisions/v{version}")
    # The tree grows as it should; what is signed beside it is another list.
    world.log.grow()
    changed = {"restriction_count": 2, "restriction_head": other.as_list().heads[2].hex()}
    await world.tell(world.checkpoint(**changed), listed=other)
    assert (await world.load(), world.keeper.floor.restriction_count) == ("LOG_SPLIT_VIEW", 1)


async def test_a_root_that_the_log_names_must_be_believed_here(world: World) -> None:
    for version in (1, 2):
        world.log.restrict(Kind.TRUST_ROOT, f"trustRoots/{version}")
    await world.tell()
    with pytest.raises(LoraportError, match="trust root"):
        await world.keeper.require_fresh(world.view)
    assert world.trust.offer(2, sealed(next_root(world.trust.root, now=int(world.clock.now()))))
    await world.keeper.require_fresh(world.view)


async def test_keys_of_which_no_root_is_known_let_nothing_be_loaded(world: World) -> None:
    world.keeper._trusted = dict(checkpoint_keys(world.trust))  # type: ignore[assignment]
    await world.tell()
    assert world.keeper.newest is not None
    with pytest.raises(AttributeError, match="version"):
        await world.load()


@pytest.mark.parametrize(
    "make",
    [
        lambda world: FakeLog(SigningKey.generate()).checkpoint(5, now=world.clock.now()),
        lambda world: world.checkpoint()[:-1],
        lambda world: world.checkpoint(life_s=601),
        lambda world: world.log.checkpoint(5, now=world.clock.now() + 3600),
    ],
)
async def test_what_proves_nothing_changes_nothing(world: World, make: Callable[[World], bytes]) -> None:
    await world.tell(make(world))
    assert world.keeper.newest is None
    assert await world.load() == "CHECKPOINT_STALE"
    assert not world.path.exists()


async def test_the_floor_is_on_disk_before_it_is_believed(world: World) -> None:
    await world.tell()
    assert json.loads(world.path.read_bytes())["tree_size"] == 3
    assert world.path.stat().st_mode & 0o777 == 0o600
    assert list(world.path.parent.iterdir()) == [world.path]
    world.path.unlink()
    world.path.parent.rmdir()
    world.path.parent.write_text("in the way")
    world.log.grow()
    await world.tell()
    assert world.keeper.floor.tree_size == 3


def test_a_spoiled_floor_is_not_guessed_at(world: World) -> None:
    world.path.parent.mkdir()
    good = {"schema": "loraport.log-floor.v1", "tree_size": 3, "root_hash": "ab" * 32}
    good |= {"catalog_epoch": 1, "revocation_epoch": 0}
    for content in (
        "",
        "{}",
        json.dumps(good | {"tree_size": -1}),
        json.dumps(good | {"root_hash": "zz"}),
        json.dumps(good | {"root_hash": 5}),
    ):
        world.path.write_text(content)
        with pytest.raises(ConfigError, match="no floor"):
            world.restart()
    for changes in ({"restriction_head": "ab"}, {"restriction_count": -1}):
        world.path.write_text(json.dumps(good | changes))
        with pytest.raises(ConfigError, match="no floor"):
            world.restart()
    world.path.write_text(json.dumps(good))
    assert world.restart().floor.tree_size == 3, "also one of a release that did not know of restrictions"
    world.path.write_text(json.dumps(good | {"more": 1}))
    assert world.restart().floor.tree_size == 3, "also one of a release that keeps more"


async def test_without_a_file_the_floor_begins_where_the_operator_says(world: World) -> None:
    policy = CheckpointPolicy(minimum_epoch=6)
    world.keeper = world.keeper_of(policy)
    assert world.keeper.floor == Floor(catalog_epoch=6)
    await world.tell()
    assert await world.load() == "CHECKPOINT_ROLLBACK"
    world.epoch = 6
    await world.tell()
    assert await world.load() == ""
    await world.keeper.close()
