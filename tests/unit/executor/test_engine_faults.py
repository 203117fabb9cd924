"""What fails on the device ends what it belongs to and nothing else; a device on which nothing works is given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from services.executor.engine.device_pool import POOL_DTYPE, DevicePool
from services.executor.engine.staging import stage
from services.executor.engine.steps import MAX_FAULTS, DeviceLost
from services.executor.plan import Plan
from services.executor.request import Ended, FinishReason, RefusalReason, Refused, Sampling
from tests.support.harness import World, open_world
from tests.support.tiny import ALL, greedy, make_adapter, make_base, prompt_of, read_bundle

LONG = Sampling(max_tokens=40, ignore_eos=True)
P = prompt_of(30)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("faults")
    base = make_base(root / "base")
    make_adapter(base, root / "P", seed=1, r=8, lora_alpha=16, target_modules=ALL)
    return root, base, read_bundle(base, root / "P")


@pytest.fixture
def world(family) -> World:
    return open_world(family[0] / "base")


def breaks_when(world: World, broken: Callable[[Plan], bool]) -> None:
    run = world.engine._runner.run

    def fragile(plan: Plan):
        if broken(plan):
            raise RuntimeError("device fault")
        return run(plan)

    world.engine._runner.run = fragile


def raising(error: Exception) -> Callable[..., object]:
    def call(*arguments: object) -> None:
        raise error

    return call


def writing_half(self: DevicePool, *arguments: object):
    yield 10
    raise RuntimeError("the link is gone")


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("bind", raising(torch.OutOfMemoryError("no memory"))),
        ("bind", raising(KeyError("a bug"))),
        ("write", raising(torch.OutOfMemoryError("no memory"))),
        ("write", writing_half),
        ("prepare", raising(RuntimeError("a bug"))),
    ],
)
def test_a_load_that_fails_on_the_device_fails_alone(family, world: World, monkeypatch, place: str, fault) -> None:
    _, base, bundle = family
    row = world.submit("innocent", P, sampling=LONG)
    world.step(2)
    staged = stage(bundle.host(), world.decoder.groups, dtype=POOL_DTYPE)
    with monkeypatch.context() as patch:
        patch.setattr(DevicePool, place, fault)
        load = world.engine.load(staged)
        for _ in range(50):
            world.engine.step()
    error = load.exception()
    if isinstance(error, Refused):
        assert error.reason is RefusalReason.ADAPTER_POOL_FULL
        assert world.faults == []
    else:
        assert world.faults == [error]
    world.faults.clear()
    world.step()
    state = world.engine.state()
    assert (state.failed, state.residents, state.free_pages) == (False, (), state.page_count)
    assert world.engine._adapters.take_dirty() == ()
    world.load(bundle.host())
    world.submit("late", P, bundle.revision_id, sampling=LONG)
    world.finish()
    assert row.tokens[:12] == greedy(base, P, 12)
    assert len(row.tokens) == len(world.transcripts["late"].tokens) == 40


def test_a_row_that_the_device_cannot_compute_ends_alone(family, world: World) -> None:
    _, base, bundle = family
    world.load(bundle.host())
    bad = world.submit("bad", P, bundle.revision_id, sampling=LONG)
    good = [world.submit(f"good{i}", prompt_of(20 + i)) for i in range(3)]
    breaks_when(world, lambda plan: bundle.revision_id in plan.revisions)
    for _ in range(50):
        world.engine.step()
    assert bad.ended[0].reason is FinishReason.ENGINE_FAULT
    assert [t.tokens for t in good] == [greedy(base, prompt_of(20 + i), 12) for i in range(3)]
    assert len(world.faults) == 1, "told once for the step"
    world.assert_idle()


def test_a_device_on_which_nothing_works_is_given_up(world: World) -> None:
    broken = True
    breaks_when(world, lambda plan: broken)
    for round_ in range(3):
        for i in range(MAX_FAULTS - 1):
            lost = world.submit(f"lost{round_}.{i}", P)
            world.engine.step()
            assert lost.ended[0].reason is FinishReason.ENGINE_FAULT
        if round_ < 2:  # One good step, and it counts anew.
            broken = False
            world.submit(f"good{round_}", P, sampling=Sampling(max_tokens=1))
            world.engine.step()
            broken = True
    world.submit("last", P)
    with pytest.raises(DeviceLost):
        world.engine.step()


def test_an_engine_whose_device_is_lost_fails_and_ends_everything(family) -> None:
    world = open_world(family[0] / "base")
    breaks_when(world, lambda plan: True)
    asked = [world.submit(f"q{i}", P, sampling=LONG) for i in range(40)]
    world.engine.start()
    world.engine._thread.join(60)
    assert world.engine.state().failed
    assert {t.ended[0].reason for t in asked} == {FinishReason.ENGINE_FAULT}
    with pytest.raises(Refused, match="DRAINING"):
        world.submit("more", P)


@pytest.mark.parametrize("final", [True, False])
def test_a_revision_is_refused_from_the_moment_of_its_revocation(family, world: World, final: bool) -> None:
    bundle = family[2]
    world.load(bundle.host())
    done = world.engine.revoke(bundle.revision_id, final=final)
    with pytest.raises(Refused, match="NOT_RESIDENT"):
        world.submit("late", P, bundle.revision_id)
    world.step()
    assert done.done()
    assert world.engine.state().residents == ()
    if final:
        with pytest.raises(Refused, match="REVOKED"):
            world.load(bundle.host())
    else:
        world.load(bundle.host())
        assert world.submit("again", P, bundle.revision_id)
        world.finish()


def test_a_load_that_ends_in_the_moment_of_a_revocation_gives_no_lease(family, world: World, monkeypatch) -> None:
    bundle, revoked = family[2], []
    bind = DevicePool.bind

    def revoke_at_the_end(self: DevicePool, *arguments: object) -> None:
        bind(self, *arguments)
        revoked.append(world.engine.revoke(bundle.revision_id, final=False))

    monkeypatch.setattr(DevicePool, "bind", revoke_at_the_end)
    load = world.engine.load(stage(bundle.host(), world.decoder.groups, dtype=POOL_DTYPE))
    world.steps_until(load.done)
    assert load.exception().reason is RefusalReason.REVOKED
    world.steps_until(revoked[0].done)
    assert world.engine.state().residents == ()


def test_who_hears_of_a_revocation_finds_nothing_left(family, world: World) -> None:
    bundle, found = family[2], []
    world.load(bundle.host())
    row = world.submit("row", P, bundle.revision_id, sampling=LONG)
    world.step(3)
    heard = row.sink

    def look(event: object) -> None:
        heard(event)
        if isinstance(event, Ended):
            found.append((world.engine.state().residents, world.engine._adapters.take_dirty()))

    world.engine._open._by_id["row"].sink = look
    world.engine.revoke(bundle.revision_id, final=True)
    world.step()
    assert found == [((), ())]


def test_a_revocation_that_cannot_erase_fails_the_engine_and_leaves_nobody_waiting(family, monkeypatch) -> None:
    root, _, bundle = family
    world = open_world(root / "base")
    world.load(bundle.host())
    row = world.submit("row", P, bundle.revision_id, sampling=LONG)
    other = world.submit("other", P, sampling=LONG)
    world.step(3)
    monkeypatch.setattr(world.engine._runner.cache, "clear", raising(RuntimeError("device fault")))
    done = world.engine.revoke(bundle.revision_id, final=True)
    world.engine.start()
    world.engine._thread.join(60)
    assert world.engine.state().failed
    assert done.exception() is not None
    assert row.ended[0].reason is FinishReason.REVOKED
    assert other.ended[0].reason is FinishReason.ENGINE_FAULT
    assert world.engine.state().residents == ()


def test_what_stands_behind_a_revocation_that_fails_is_answered_too(family, monkeypatch) -> None:
    root, base, bundle = family
    world = open_world(root / "base")
    world.load(bundle.host())
    make_adapter(base, root / "Q", seed=2, r=8, lora_alpha=16, target_modules=ALL)
    other = read_bundle(base, root / "Q")
    monkeypatch.setattr(world.engine._runner.cache, "clear", raising(RuntimeError("device fault")))
    first = world.engine.revoke(bundle.revision_id, final=True)
    load = world.engine.load(stage(other.host(), world.decoder.groups, dtype=POOL_DTYPE))
    row = world.submit("behind", P, sampling=LONG)
    second = world.engine.revoke(other.revision_id, final=True)
    question = world.engine.ask(lambda: 7)
    world.engine.start()
    world.engine._thread.join(60)
    assert world.engine.state().failed
    assert [str(done.exception(0)) for done in (first, second)] == ["device fault"] * 2
    assert isinstance(load.exception(0), Refused)
    assert question.result(0) == 7
    assert [event.reason for event in row.ended] == [FinishReason.ENGINE_FAULT]
