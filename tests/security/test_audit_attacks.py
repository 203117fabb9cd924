"""Somebody with a hand on the registry's database changes the audit trail; `loraport audit verify` says where."""

import pytest

from tests.security.test_log_attacks import World, world

__all__ = ["world"]

LAST = "(SELECT max(sequence) FROM audit_events)"
ATTACKS = [
    ("UPDATE audit_events SET reason = 'routine' WHERE sequence = 3", "event 3 or its hash was changed"),
    ("UPDATE audit_events SET principal = 'nobody' WHERE sequence = 1", "event 1 or its hash was changed"),
    ("DELETE FROM audit_events WHERE sequence = 3", "event 3 is missing"),
    ("DELETE FROM audit_events WHERE sequence <= 2", "event 1 is missing"),
    ("UPDATE audit_events SET sequence = CASE sequence WHEN 3 THEN -4 ELSE -3 END WHERE sequence IN (3, 4)", ""),
    (f"DELETE FROM audit_events WHERE sequence = {LAST}", "the log names event"),
    (f"DELETE FROM audit_events WHERE sequence > {LAST} - 3", "the log names event"),
    ("DELETE FROM audit_events", "the log names event"),
]


@pytest.mark.parametrize(("attack", "fault"), ATTACKS)
async def test_a_trail_that_was_changed_by_hand(world: World, attack: str, fault: str) -> None:
    """Nobody has looked at the trail before: only the log knows how long it was."""
    await world.rig.service._anchors.anchor()
    code, found = await world.cli("verify", of="audit")
    assert (code, found["good"]) == (0, True)
    (world.folder / "state" / "audit-chain.json").unlink()
    world.sql((attack, ()))
    # Two rows that have changed places, in the two steps that the key asks for.
    world.sql(("UPDATE audit_events SET sequence = -sequence WHERE sequence < 0", ()))
    code, found = await world.cli("verify", of="audit")
    assert (code, found["good"]) == (1, False)
    assert fault in found["fault"]


async def test_a_leaf_names_the_newest_event_and_is_not_repeated(world: World) -> None:
    before = (await world.cli("verify"))[1]["tree_size"]
    anchors = world.rig.service._anchors
    await anchors.anchor()
    await anchors.anchor()
    assert (await world.cli("verify"))[1]["tree_size"] == before + 1, "nothing happened in between"
    await world.rig.tenant("globex")
    before = (await world.cli("verify"))[1]["tree_size"]
    await anchors.anchor()
    code, found = await world.cli("verify")
    assert (code, found["tree_size"]) == (0, before + 1)


async def test_a_trail_that_was_made_anew_is_not_the_one_that_the_log_names(world: World) -> None:
    """Every hash fits its event and the one before; only the log says that these are other events."""
    await world.rig.service._anchors.anchor()
    world.forge_audit_trail(reason="routine")
    code, found = await world.cli("verify", of="audit")
    assert code == 1
    assert "is not the one that the log names" in found["fault"]
