"""The log as a table: what ended does not go on, and only what holds is in it."""

from loraport.log.leaf import FIRST, Kind, Leaf
from loraport.log.replay import Replay, Said, shared_digest

REVISION, ADAPTER = "tenants/acme/adapters/bot/revisions/v1", "tenants/acme/adapters/bot"
DIGEST = "sha256:" + "1" * 64


def replayed(*leaves: tuple[Kind, str, str]) -> dict[str, Said]:
    replay = Replay()
    for index, (kind, resource, digest) in enumerate(leaves):
        replay.take(Leaf(index=index, time=1, kind=kind, resource=resource, digest=digest, previous=FIRST))
    return replay.said


def states(*kinds: Kind) -> str:
    return replayed(*((kind, REVISION, DIGEST) for kind in kinds))[REVISION].text


def test_what_ended_does_not_go_on_whatever_is_appended() -> None:
    assert states(Kind.ANNOUNCED, Kind.VERIFIED, Kind.RECORD) == "ACTIVE"
    assert states(Kind.RECORD, Kind.VERIFIED, Kind.RECORD) == "ACTIVE", "withdrawn and approved again"
    for later in (Kind.RECORD, Kind.VERIFIED, Kind.ANNOUNCED, Kind.QUARANTINED):
        assert states(Kind.RECORD, Kind.REVOKED, later) == "REVOKED"
    for later in (Kind.RECORD, Kind.VERIFIED, Kind.ANNOUNCED):
        assert states(Kind.RECORD, Kind.QUARANTINED, later) == "QUARANTINED"
    assert states(Kind.QUARANTINED, Kind.REVOKED) == "REVOKED"
    key = "tenants/acme/keys/k"
    assert replayed((Kind.API_KEY_REVOKED, key, DIGEST), (Kind.API_KEY_CREATED, key, DIGEST))[key].text == "revoked"


def test_a_share_and_a_delegation_are_what_was_said_last() -> None:
    some, more = shared_digest(["globex"]), shared_digest(["globex", "initech"])
    assert replayed((Kind.SHARED, ADAPTER, some), (Kind.SHARED, ADAPTER, more)) == {ADAPTER: Said(more, 1)}
    assert replayed((Kind.SHARED, ADAPTER, some), (Kind.SHARED, ADAPTER, shared_digest(()))) == {}
    names = [f"tenants/{tenant}/delegations/{version}" for tenant, version in (("a", 1), ("b", 1), ("a", 2))]
    assert set(replayed(*((Kind.DELEGATED, name, DIGEST) for name in names))) == set(names[1:])
