"""Sides of a rollout: conversations stay where they are while a share grows, and nobody stays when it falls."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from services.router.rollout_split import IDLE_S, Conversations, choose, revision_of
from services.shared.catalog import CatalogView, RolloutItem

ITEM = RolloutItem(
    name="tenants/acme/adapters/bot/rollouts/r1", tenant="acme", adapter="bot", alias="prod", salt=bytes(16),
    from_revision_id="old", to_revision_id="new", base_model="tiny", state="SPLITTING", share_basis_points=0,
    step_index=0, shadow_basis_points=0, generation=1, ended=False,
)  # fmt: skip


def at(share: int) -> RolloutItem:
    return dataclasses.replace(ITEM, share_basis_points=share)


def ask(known: Conversations, share: int, session: str, now: float = 0.0) -> str:
    item = at(share)
    arm, _ = choose(item, "acme", f"session/{session}")
    return known.settle(item, arm, tenant="acme", session=session, now=now)


def test_a_growing_share_moves_no_conversation_and_a_still_one_begins_anew() -> None:
    known = Conversations()
    assert ask(known, 0, "a") == "old"
    assert ask(known, 10_000, "a", now=1.0) == "old"
    assert ask(known, 10_000, "b", now=1.0) == "new"
    assert ask(known, 10_000, "a", now=2.0 + IDLE_S) == "new"


def test_a_share_that_falls_takes_everybody_back() -> None:
    known = Conversations()
    assert ask(known, 10_000, "a") == "new"
    assert revision_of(at(0), ask(known, 0, "a")) == "old"


def test_without_a_session_nothing_is_remembered_and_memory_is_bounded() -> None:
    known = Conversations(most=3)
    for number in range(5):
        ask(known, 0, f"s{number}", now=float(number))
    assert len(known) == 3
    assert known.settle(ITEM, "new", tenant="acme", session="", now=9.0) == "new"
    assert len(known) == 3
    ask(known, 0, "late", now=4.0 + IDLE_S)
    assert len(known) == 2, "s4 is remembered for just so long"
    known.forget(CatalogView(rollouts={("acme", "bot", "prod"): ITEM}))
    assert len(known) == 2
    known.forget(CatalogView())
    assert len(known) == 0


def test_no_tenant_makes_anothers_conversations_forgotten() -> None:
    known = Conversations(most=3)
    assert ask(known, 0, "mine") == "old"
    for number in range(50):
        known.settle(at(0), "old", tenant="globex", session=f"s{number}", now=1.0)
    assert ask(known, 10_000, "mine", now=2.0) == "old"


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=12), st.integers(0, 500))
def test_whoever_was_moved_is_moved_once_and_only_by_a_growing_share(shares: list[int], number: int) -> None:
    """One session that never rests, over shares that only grow: at most it begins new, and then it stays new."""
    known = Conversations()
    arms = [ask(known, share, f"s{number}", now=float(i)) == "new" for i, share in enumerate(sorted(shares))]
    assert len(set(arms)) == 1
