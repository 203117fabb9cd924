"""Whose work was on board of an executor that went away, and who is suspected for how long."""

from dataclasses import replace

from services.router.rollout_losses import SUSPECT_S, Losses
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


def test_it_is_a_loss_of_those_rollouts_whose_new_revision_was_on_board_once_for_each_process() -> None:
    other = replace(ITEM, name="r2", adapter="other", to_revision_id="another", from_revision_id="new")
    losses = following(ITEM, other)
    losses.lost("e0", 7, {"old", ""})
    assert not losses.untold()
    losses.lost("e0", 7, {"new", "old"})
    losses.lost("e0", 7, {"new", "another"})
    losses.lost("e0", 8, {"new"})
    assert [(x.rollout, x.epoch) for x in losses.untold()] == [("r1", 7), ("r2", 7), ("r1", 8)]


def test_a_load_or_a_probe_is_on_board_while_it_lasts() -> None:
    losses = following(ITEM)
    with losses.boarding("e0", "new"):
        losses.lost("e1", 1, ())
        assert not losses.untold()
        losses.lost("e0", 1, ())
    assert len(losses.untold()) == 1
    losses.lost("e0", 2, ())
    assert len(losses.untold()) == 1


def test_it_is_suspected_until_the_registry_has_moved_or_said_nothing_for_long() -> None:
    losses = following(ITEM)
    assert losses.on_trial("new")
    assert not losses.on_trial("old")
    losses.lost("e0", 7, {"new"})
    (loss,) = losses.untold()
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
