"""What is found of peers that were told something: each rule broken once."""

from dataclasses import asdict

import pytest

from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import SigningKey, sign_envelope
from loraport.log.checkpoint import Checkpoint, open_checkpoint
from loraport.log.peers import Standing, Told, compare
from tests.support.translog import FakeLog

KEY = SigningKey.generate()
TRUSTED = {KEY.key_id: KEY.public_pem}
NOW = 1_000_000.0


def told(log: FakeLog, peer: str = "loader", *, now: float = NOW, **claims: object) -> Told:
    seen = {"tree_size": log.size, "root_hash": log.root().hex(), "envelope": log.checkpoint(1, now=now)}
    return Told(peer=peer, **(seen | claims))  # type: ignore[arg-type]


def own(log: FakeLog) -> Checkpoint:
    return open_checkpoint(log.checkpoint(1, now=NOW), TRUSTED, now=NOW)


def found(registry: FakeLog, *answers: Told) -> list[Standing]:
    return compare(answers, own(registry), trusted=TRUSTED, now=NOW, prove=registry.prove)


def codes(registry: FakeLog, *answers: Told) -> list[str]:
    return [item.code for item in found(registry, *answers)]


@pytest.mark.parametrize("grown", [0, 1, 5])
def test_a_peer_whose_log_is_where_the_registrys_begins(grown: int) -> None:
    log = FakeLog(KEY, size=3)
    seen = told(log)
    log.grow(grown)
    [item] = found(log, seen)
    assert (item.code, item.alarm) == ("OK", False)
    assert item.checkpoint is not None
    assert item.checkpoint.tree_size == 3


def test_the_empty_log_is_where_every_log_begins() -> None:
    empty, log = FakeLog(KEY, size=0), FakeLog(KEY, size=4)
    assert codes(log, told(empty)) == ["OK"]


@pytest.mark.parametrize("grown", [0, 1, 5])
def test_a_peer_that_was_told_another_history(grown: int) -> None:
    log, other = FakeLog(KEY, size=3), FakeLog(KEY, size=3, history="other")
    seen = told(other)
    log.grow(grown)
    [item] = found(log, seen)
    assert (item.code, item.alarm) == ("SPLIT_VIEW", True)
    assert item.envelope == seen.envelope, "the evidence is kept"


def test_two_peers_with_two_roots_of_one_size_both_show_it() -> None:
    log, other = FakeLog(KEY, size=3), FakeLog(KEY, size=3, history="other")
    answers = told(log, "loader"), told(other, "executor/a")
    log.grow(4)
    assert codes(log, *answers) == ["SPLIT_VIEW", "SPLIT_VIEW"]


def test_a_registry_without_a_proof_is_taken_for_one_that_cannot_have_any() -> None:
    log = FakeLog(KEY, size=3)
    seen = told(log)
    log.grow()
    [item] = compare([seen], own(log), trusted=TRUSTED, now=NOW, prove=lambda old, new: None)
    assert item.code == "SPLIT_VIEW"


def test_a_peer_ahead_of_the_registry_shows_that_it_went_back() -> None:
    log, longer = FakeLog(KEY, size=3), FakeLog(KEY, size=5)
    assert codes(log, told(longer)) == ["ROLLBACK"]


def test_a_peer_that_lags_beyond_the_life_of_its_checkpoint() -> None:
    log = FakeLog(KEY, size=3)
    at_the_end, late = told(log, now=NOW - 600), told(log, now=NOW - 601)
    log.grow()
    assert codes(log, at_the_end, late) == ["OK", "STALE"]


def test_another_history_is_worse_than_an_old_one() -> None:
    log, other = FakeLog(KEY, size=3), FakeLog(KEY, size=3, history="other")
    assert codes(log, told(other, now=NOW - 601)) == ["SPLIT_VIEW"]


@pytest.mark.parametrize(
    "claims",
    [
        {"envelope": b"{}"},
        {"envelope": b""},
        {"tree_size": 4},
        {"root_hash": "0" * 64},
        {"envelope": FakeLog(SigningKey.generate(), size=3).checkpoint(1, now=NOW)},
    ],
    ids=["no envelope", "none", "another size", "another root", "another key"],
)
def test_what_is_not_proven_is_forged(claims: dict[str, object]) -> None:
    log = FakeLog(KEY, size=3)
    [item] = found(log, told(log, **claims))
    assert (item.code, item.alarm, item.checkpoint) == ("FORGED", True, None)


def test_what_is_forged_says_nothing_of_the_others() -> None:
    log, liar = FakeLog(KEY, size=3), FakeLog(SigningKey.generate(), size=3, history="lie")
    assert codes(log, told(liar, "executor/a"), told(log, "loader")) == ["FORGED", "OK"]


def told_before(log: FakeLog, *, now: float = NOW, key: SigningKey = KEY) -> Told:
    """Returns what a peer of an earlier release shows: its checkpoint does not say what was taken back."""
    value = asdict(open_checkpoint(log.checkpoint(1, now=now), TRUSTED, now=now))
    del value["restriction_count"], value["restriction_head"]
    return told(log, envelope=sign_envelope(Checkpoint.TYPE, canonical(value), key))


def test_a_peer_of_an_earlier_release_is_no_alarm_by_that() -> None:
    log, other = FakeLog(KEY, size=3), FakeLog(KEY, size=3, history="other")
    before, late, forged = (
        told_before(log),
        told_before(log, now=NOW - 601),
        told_before(log, key=SigningKey.generate()),
    )
    split = told_before(other)
    log.grow()
    items = [*found(log, before, late, forged), *found(log, split)]
    assert [(item.code, item.alarm) for item in items] == [
        ("OLDER", False), ("STALE", True), ("FORGED", True), ("SPLIT_VIEW", True)
    ]  # fmt: skip
    assert all("earlier release" in item.detail for item in items[:2])


def test_who_says_nothing_is_no_alarm() -> None:
    log = FakeLog(KEY, size=3)
    items = found(log, Told(peer="loader", fault="no answer"), Told(peer="executor/a"))
    assert [(item.code, item.alarm) for item in items] == [("UNREACHABLE", False), ("NONE", False)]
