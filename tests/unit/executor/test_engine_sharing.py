"""Several answers to one prompt, and the order of requests: what is shared, what is given back, who goes first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from services.executor.adapter_pool import AdapterPool
from services.executor.engine.loop import Engine
from services.executor.execution import Execution
from services.executor.plan import Plan
from services.executor.request import FinishReason, Request, RequestSpec, Sampling, Score, in_order
from tests.support.harness import World, open_world
from tests.support.tiny import ALL, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter

PROMPT = prompt_of(100)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("sharing")
    base = make_base(root / "base")
    make_adapter(base, root / "P", seed=1, r=8, lora_alpha=16, target_modules=ALL)
    return root, base, read_bundle(base, root / "P")


@pytest.fixture
def world(family) -> World:
    world = open_world(family[0] / "base")
    world.load(family[2].host())
    return world


def watch(world: World) -> list[Plan]:
    plans: list[Plan] = []
    run = world.engine._runner.run
    world.engine._runner.run = lambda plan: (plans.append(plan), run(plan))[1]
    return plans


def answers(count: int, revision: str | None, **changes: object) -> list[RequestSpec]:
    sampling = Sampling(**{"max_tokens": 8, "temperature": 1.0, "ignore_eos": True, **changes})
    return [
        RequestSpec(
            request_id=f"n/{i}", prompt=PROMPT, sampling=replace(sampling, seed=i), revision_id=revision, salt=b"acme"
        )
        for i in range(count)
    ]


async def ended(world: World, execution: Execution, limit: int = 400) -> dict[int, list[int]]:
    """Steps until every answer has ended; returns the tokens by answer."""
    tokens: dict[int, list[int]] = {}
    done = asyncio.Event()

    async def read() -> None:
        async for index, event in execution.events():
            if hasattr(event, "token_ids"):
                tokens.setdefault(index, []).extend(event.token_ids)
        done.set()

    reading = asyncio.create_task(read())
    for _ in range(limit):
        world.step()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if done.is_set():
            break
    await asyncio.wait_for(reading, 60)
    return tokens


async def test_n_answers_compute_their_prompt_once_and_differ(family, world: World) -> None:
    plans = watch(world)
    execution = Execution(world.engine, answers(4, family[2].revision_id))
    execution.submit()
    assert world.engine.state().residents[0].leases == 4
    tokens = await ended(world, execution)
    computed = sum(max(0, min(row.end, 96) - row.start) for plan in plans for row in plan.rows)
    assert computed == 96, "the six full blocks of the prompt are computed by one answer only"
    assert len({tuple(t) for t in tokens.values()}) > 1
    world.assert_idle()
    assert world.engine.state().residents[0].leases == 0
    alone = open_world(family[0] / "base")
    alone.load(family[2].host())
    spec = answers(4, family[2].revision_id)[2]
    one = alone.submit("one", spec.prompt, spec.revision_id, sampling=spec.sampling)
    alone.finish()
    assert one.tokens == tokens[2], "an answer is that of its seed, whoever it shared its prompt with"


@pytest.mark.parametrize("after", [0, 1, 2, 4, 7, 30])
async def test_a_cancelled_group_gives_every_lease_and_block_back_once_within_two_steps(
    family, world: World, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    released: list[int] = []
    release = AdapterPool.release
    monkeypatch.setattr(AdapterPool, "release", lambda self, lease: (released.append(lease), release(self, lease))[1])
    execution = Execution(world.engine, answers(3, family[2].revision_id, max_tokens=12))
    execution.submit()
    world.step(after)
    execution.close()
    execution.close()
    world.step(2)
    world.assert_idle()
    assert sorted(released) == sorted(set(released))
    assert len(released) == 3


async def test_a_group_of_which_one_is_refused_leaves_nothing(family, world: World) -> None:
    specs = answers(3, family[2].revision_id)
    execution = Execution(world.engine, [*specs[:2], replace(specs[2], prompt=())])
    with pytest.raises(Exception, match="EMPTY_PROMPT"):
        execution.submit()
    world.step(2)
    world.assert_idle()


async def test_a_group_of_which_one_was_refused_can_be_handed_in_again(family, world: World) -> None:
    revision = family[2].revision_id
    execution = Execution(world.engine, answers(3, revision))
    submit, evicted = world.engine.submit, []

    def evict_after_the_first(spec: RequestSpec, sink: object) -> None:
        submit(spec, sink)
        if not evicted:
            evicted.append(world.engine.evict(revision))
            world.step()

    world.engine.submit = evict_after_the_first
    with pytest.raises(Exception, match="NOT_RESIDENT"):
        execution.submit()
    gone = asyncio.create_task(execution.withdraw())
    await asyncio.sleep(0)
    assert not gone.done()
    world.step(2)
    await asyncio.wait_for(gone, 60)
    world.load(family[2].host())
    execution.submit()
    tokens = await ended(world, execution)
    assert [len(tokens[index]) for index in range(3)] == [8, 8, 8]
    world.assert_idle()


def test_requests_of_one_prompt_wait_for_its_blocks_and_others_pass_them(family, world: World) -> None:
    plans = watch(world)
    base = family[1]
    for i in range(3):
        world.submit(f"same{i}", PROMPT, salt=b"acme")
    world.submit("other tenant", PROMPT, salt=b"globex")
    world.submit("adapted", PROMPT, family[2].revision_id, salt=b"acme")
    world.submit("short", prompt_of(4), salt=b"acme")
    world.submit("scored", PROMPT[:40], score=Score(PROMPT[40:]), salt=b"acme")
    world.step()
    first = {row.request_id for row in plans[0].rows}
    assert "same1" not in first
    assert "same2" not in first
    world.finish()
    wanted = greedy(base, PROMPT, 12)
    for name in ("same0", "same1", "same2", "other tenant"):
        assert world.transcripts[name].tokens == wanted, name
    assert world.transcripts["adapted"].tokens == greedy(with_adapter(base, family[0] / "P"), PROMPT, 12)
    hits = {name: t.ended[0].usage.prefix_hit_tokens for name, t in world.transcripts.items()}
    assert hits == {
        "same0": 0, "same1": 96, "same2": 96, "other tenant": 0, "adapted": 0, "short": 0, "scored": 32,
    }  # fmt: skip
    world.assert_idle()


def test_followers_go_on_when_their_leader_is_cancelled_or_fails(world: World) -> None:
    leader = world.submit("leader", PROMPT)
    followers = [world.submit(f"f{i}", PROMPT) for i in range(2)]
    world.step()
    world.engine.cancel("leader")
    world.finish()
    assert leader.ended[0].reason is FinishReason.CANCELLED
    assert all(f.ended[0].reason.is_answer for f in followers)
    assert followers[0].tokens == followers[1].tokens


def request(number: int, tenant: bytes, priority: int = 0) -> Request:
    spec = RequestSpec(request_id=str(number), prompt=(3,), sampling=Sampling(), salt=tenant, priority=priority)
    return Request(spec=spec, sequence=number, arrival=0.0)


def test_priority_orders_a_tenants_own_requests_and_never_tenants() -> None:
    asked = [request(1, b"a"), request(2, b"b"), request(3, b"a", 9), request(4, b"b", -1), request(5, b"a", 10)]
    order = in_order(reversed(asked))
    assert [r.sequence for r in order] == [5, 2, 3, 4, 1]
    assert [r.spec.salt for r in order] == [r.spec.salt for r in asked], "a tenant keeps its places"
    plain = [request(i, b"a") for i in (3, 1, 2)]
    assert all(x.sequence < y.sequence for x, y in pairwise(in_order(plain)))


def test_a_tenants_probes_have_places_of_the_tenants() -> None:
    asked = [request(1, b"a"), request(2, b"b"), request(3, b"a", 9)]
    asked[0] = replace(asked[0], spec=replace(asked[0].spec, salt=b"the probe's own", owner=b"a"))
    assert [r.sequence for r in in_order(asked)] == [3, 2, 1]


def test_a_tenant_cannot_push_anothers_request_out_by_priority(family) -> None:
    """The engine has room for one row at a time: globex asked first and is served first."""
    from tests.support.harness import SMALL

    world = open_world(family[0] / "base", replace(SMALL, max_rows=1))
    first = world.submit("globex", PROMPT, salt=b"globex")
    pushy = world.submit("acme", prompt_of(50), salt=b"acme", priority=10)
    world.step(3)
    assert first.started
    assert not pushy.started
    world.finish()
    assert isinstance(world.engine, Engine)
