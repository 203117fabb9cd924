"""What is done between two steps while rows run is bounded in bytes, and drains end in a bounded number of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.executor.engine import device_link
from services.executor.engine.device_pool import POOL_DTYPE, DevicePool
from services.executor.engine.staging import stage
from services.executor.prefill import PromptPace
from services.executor.request import FinishReason, RefusalReason, Refused, Sampling
from tests.support.harness import SMALL, World, open_world
from tests.support.tiny import ALL, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter

LONG = Sampling(max_tokens=200, ignore_eos=True)
BUDGET = 20_000


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("bounds")
    base = make_base(root / "base")
    bundles = []
    for i in range(4):
        make_adapter(base, root / str(i), seed=i, r=24, lora_alpha=16, target_modules=ALL)
        bundles.append(read_bundle(base, root / str(i)))
    return root, bundles


def metered(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Returns the bytes that are written and erased between two runs of the model, and the sizes of single pieces."""
    between, pieces = [0], [0]
    page = world.engine.state().page_bytes
    write, scrub, run = DevicePool.write, DevicePool.scrub, world.engine._runner.run

    def note(size: int) -> None:
        between[-1] += size
        pieces.append(size)

    def writing(self: DevicePool, *arguments: object):
        for size in write(self, *arguments):
            note(size)
            yield size

    monkeypatch.setattr(DevicePool, "write", writing)
    monkeypatch.setattr(DevicePool, "scrub", lambda self, pages: (note(len(pages) * page), scrub(self, pages))[1])
    world.engine._runner.run = lambda plan: (between.append(0), run(plan))[1]
    return between, pieces


def test_loads_and_evictions_beside_a_running_row_move_bounded_bytes_per_step(family, monkeypatch) -> None:
    root, bundles = family
    one = stage(bundles[0].host(), open_world(root / "base").decoder.groups, dtype=POOL_DTYPE)
    world = open_world(root / "base", replace(SMALL, pool_bytes=one.size_bytes * 2))
    world.engine._options = replace(world.engine._options, load_bytes_per_step=BUDGET)
    row = world.submit("row", prompt_of(5), sampling=LONG)
    world.step(2)
    between, pieces = metered(world, monkeypatch)
    for bundle in bundles:
        world.load(bundle.host())
    state = world.engine.state()
    assert state.evictions >= 2
    moved, page = sum(between), state.page_bytes
    assert moved >= 4 * one.size_bytes + 2 * 3 * page, "everything was written and erased"
    assert max(between) <= BUDGET + max(page, max(pieces)), "one piece may go beyond the budget, no more"
    assert len(row.tokens) >= moved // (BUDGET + page), "and each had a step of its own"
    world.finish()
    world.assert_idle()


def test_what_is_idle_is_not_held_up_by_the_bound(family) -> None:
    root, bundles = family
    world = open_world(root / "base")
    world.engine._options = replace(world.engine._options, load_bytes_per_step=1)
    future = world.engine.load(stage(bundles[0].host(), world.decoder.groups, dtype=POOL_DTYPE))
    world.step(2)
    assert future.done()


def test_a_revocation_erases_at_once_whatever_the_bound(family) -> None:
    root, bundles = family
    world = open_world(root / "base")
    for bundle in bundles[:2]:
        world.load(bundle.host())
    world.engine._options = replace(world.engine._options, load_bytes_per_step=1)
    world.submit("row", prompt_of(5), sampling=LONG)
    world.step(2)
    done = world.engine.revoke(bundles[0].revision_id, final=True)
    world.step()
    assert done.done()
    assert not world.engine._adapters.take_dirty()


def test_a_drained_engine_ends_what_runs_and_takes_nothing(family) -> None:
    root, bundles = family
    world = open_world(root / "base")
    world.load(bundles[0].host())
    asked = [
        world.submit(f"q{i}", prompt_of(20 + i), bundles[0].revision_id if i % 2 else None, sampling=Sampling(max_tokens=9))
        for i in range(24)
    ]  # fmt: skip
    world.step(2)
    world.engine.drain()
    attempts: list[Callable[[], object]] = [
        lambda: world.submit("late", prompt_of(3)),
        lambda: world.engine.load(stage(bundles[1].host(), world.decoder.groups, dtype=POOL_DTYPE)),
    ]
    for attempt in attempts:
        with pytest.raises(Refused) as refused:
            attempt()
        assert refused.value.reason is RefusalReason.DRAINING
    prompts = sum(len(prompt_of(20 + i)) for i in range(24))
    # Beside rows that generate, prompts take a part of a step.
    per_step = PromptPace().beside(1, world.engine._scheduler.limits.max_step_tokens)
    bound = prompts // per_step + 2 * (9 + 2) + 4
    for _ in range(bound):
        world.step()
    assert {t.ended[0].reason for t in asked if t.ended} <= {FinishReason.LENGTH, FinishReason.EOS}
    assert all(t.ended for t in asked)
    world.assert_idle()


def test_a_large_group_is_written_in_pieces_and_answers_the_same(family, monkeypatch) -> None:
    root, bundles = family
    told = []
    for piece in (device_link.CpuLink.piece_bytes, 1500):
        monkeypatch.setattr(device_link.CpuLink, "piece_bytes", piece)
        world = open_world(root / "base")
        _, pieces = metered(world, monkeypatch)
        world.load(bundles[0].host())
        told.append(world.submit("x", prompt_of(30), bundles[0].revision_id, sampling=LONG))
        told[-1].largest = max(pieces)
        world.finish()
    assert told[0].tokens == told[1].tokens
    rows = [sum(g.out_features) * 4 + len(g.out_features) * g.in_features * 4 for g in world.decoder.groups]
    assert told[1].largest <= max(1500, *rows) < told[0].largest


def test_an_embedding_is_written_in_pieces_too_and_has_a_budget_of_its_own(family, tmp_path, monkeypatch) -> None:
    base = make_base(tmp_path / "base")
    make_adapter(base, tmp_path / "words", seed=7, r=8, lora_alpha=16, target_modules=["embed_tokens", "q_proj"])
    bundle = read_bundle(base, tmp_path / "words")
    monkeypatch.setattr(device_link.CpuLink, "piece_bytes", 2000)
    world = open_world(tmp_path / "base")
    staged = stage(bundle.host(), world.decoder.groups, dtype=POOL_DTYPE)
    assert (staged.rank, staged.beside_bytes) == (8, (256 + 64) * 8 * 4)
    _, pieces = metered(world, monkeypatch)
    world.load(bundle.host())
    assert max(pieces) <= 2000
    assert sum(pieces) >= staged.beside_bytes
    row = world.submit("x", prompt_of(30), bundle.revision_id)
    world.finish()
    assert row.tokens == greedy(with_adapter(base, tmp_path / "words"), prompt_of(30), 12)
    assert sum(world.engine._adapters._beside.values()) == staged.beside_bytes
    pool = world.engine._runner.pool
    assert pool._arriving == {}
    world.engine.evict(bundle.revision_id)
    world.step(2)
    assert (world.engine._adapters._beside, pool._bound) == ({}, {})
    # A load that is stopped on its way leaves nothing there.
    world.engine._options = replace(world.engine._options, load_bytes_per_step=1)
    world.submit("busy", prompt_of(5), sampling=LONG)
    world.step(2)
    load = world.engine.load(staged)
    world.step(2)
    assert pool._arriving
    world.engine.revoke(bundle.revision_id, final=True)
    world.step()
    assert load.exception() is not None
    assert (world.engine._adapters._beside, pool._arriving) == ({}, {})
