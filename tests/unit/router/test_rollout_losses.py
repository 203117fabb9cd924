"""Whose work was on board of an executor that went away, and who is suspected for how long."""

import asyncio
from dataclasses import replace

import pytest

from services.router.rollout_losses import SURE_S, SUSPECT_S, Loss, Losses
from services.shared.catalog import CatalogView, RolloutItem

ITEM = RolloutItem(
    name="r1", tenant="acme", adapter="bot", alias="prod", salt=b"s", from_revision_id="old", to_revision_id="new",
    base_model="tiny", state="SPLITTING", share_basis_points=100, step_index=0, shadow_basis_points=0, generation=4,
    ended=False,
)  # fmt: skip


def view(*items: RolloutItem) -> CatalogView:
    return CatalogView(rollouts={(item.tenant, item.adapter, item.alias): item for item in items})


def following(*items: RolloutItem) -> Losses:
    losses = Losses()
    losses.follow(view(*items))
    return losses


def told(losses: Losses) -> list[Loss]:
    """What is told once everything has stayed out for long."""
    losses.untold(0.0, answering=True)
    return losses.untold(10**6, answering=True)


def test_it_is_a_loss_of_those_rollouts_whose_new_revision_was_on_board_once_for_each_process() -> None:
    other = replace(ITEM, name="r2", adapter="other", to_revision_id="another", from_revision_id="new")
    losses = following(ITEM, other)
    losses.lost("e0", 7, {"old", ""})
    assert not told(losses)
    losses.lost("e0", 7, {"new", "old"})
    losses.lost("e0", 7, {"new", "another"})
    losses.lost("e0", 8, {"new"})
    assert [(x.rollout, x.epoch) for x in told(losses)] == [("r1", 7), ("r2", 7), ("r1", 8)]


def test_a_load_or_a_probe_is_on_board_while_it_lasts() -> None:
    losses = following(ITEM)
    with losses.boarding("e0", "new"):
        losses.lost("e1", 1, ())
        assert not told(losses)
        losses.lost("e0", 1, ())
    assert len(told(losses)) == 1
    losses.lost("e0", 2, ())
    assert len(told(losses)) == 1


def test_it_is_suspected_until_the_registry_has_moved_or_said_nothing_for_long() -> None:
    losses = following(ITEM)
    assert losses.on_trial("new")
    assert not losses.on_trial("old")
    losses.lost("e0", 7, {"new"})
    (loss,) = told(losses)
    assert losses.suspects(ITEM, 10**6), "nobody has been told"
    loss.told = 100.0
    assert losses.suspects(ITEM, 100.0 + SUSPECT_S - 1)
    assert not losses.suspects(ITEM, 100.0 + SUSPECT_S)
    assert not losses.suspects(replace(ITEM, generation=5), 101.0)
    assert not losses.suspects(replace(ITEM, state="RETAINING"), 101.0)
    assert not losses.suspects(replace(ITEM, name="r2"), 101.0)
    losses.follow(view())
    assert not losses.suspects(ITEM, 101.0)
    assert not losses.on_trial("new")


def test_it_is_told_when_another_process_answers_or_it_says_that_it_has_failed() -> None:
    losses = following(ITEM)
    losses.lost("e0", 7, {"new"})
    losses.lost("e1", 7, {"new"})
    losses.lost("e2", 7, {"new"})
    assert losses.suspects(ITEM, 0.0)
    assert not losses.untold(0.0, answering=True)
    losses.answered("e0", 8, False)
    losses.answered("e1", 7, True)
    losses.answered("e2", 7, False)
    assert [x.executor for x in losses.untold(0.0, answering=True)] == ["e0", "e1"]
    assert [x.executor for x in told(losses)] == ["e0", "e1"], "what is back as it was is no loss"
    losses.lost("e2", 7, {"new"})
    assert len(told(losses)) == 3, "it goes away later all the same"


def test_it_is_told_when_it_has_stayed_out_for_long_while_others_answered() -> None:
    losses = following(ITEM)
    losses.lost("e0", 7, {"new"})
    assert not losses.untold(0.0, answering=True)
    assert not losses.untold(SURE_S - 1, answering=True)
    assert not losses.untold(10 * SURE_S, answering=False)
    assert not losses.untold(10 * SURE_S, answering=True), "the time begins anew"
    assert not losses.untold(11 * SURE_S - 1, answering=True)
    assert losses.untold(11 * SURE_S, answering=True)


async def test_who_waits_for_its_turn_is_not_sent_away_by_another_rollouts_loss() -> None:
    losses = following(ITEM, replace(ITEM, name="r2", adapter="other", to_revision_id="another"))
    went = []

    async def ask(fails: asyncio.Event) -> None:
        async with losses.in_turn("new"):
            went.append(fails)
            await fails.wait()
            raise ConnectionError

    first, second = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(ask(event)) for event in (first, second)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    losses.lost("e0", 7, {"another"})
    for event, task in zip((first, second), tasks, strict=True):
        event.set()
        with pytest.raises(ConnectionError):
            await task
    assert went == [first, second]
