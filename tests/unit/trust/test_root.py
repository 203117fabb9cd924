"""The table of `loraport.trust.root`: every rule that a next root can break, and what a key is believed for."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import SigningKey, add_signatures, sign_envelope
from loraport.trust.edit import GRACE_S, first_root, leaked_earlier, next_root
from loraport.trust.root import (
    MAX_ROTATIONS,
    PAYLOAD_TYPE,
    Role,
    RoleKeys,
    RootError,
    TrustRoot,
    accept,
    open_first,
    parse_root,
    require_current,
    verify_chain,
)
from tests.support.roots import NOW, sealed

ONE, TWO, THREE = sorted((SigningKey.generate() for _ in range(3)), key=lambda key: key.key_id)
ONLINE = {role: SigningKey.generate() for role in Role if role != Role.ROOT}


def root(*holders: SigningKey, threshold: int = 1) -> TrustRoot:
    keys = {role: [key.public_pem] for role, key in ONLINE.items()}
    return first_root({Role.ROOT: [key.public_pem for key in holders], **keys}, now=NOW, threshold=threshold)


def code(old: TrustRoot, envelope: bytes) -> str:
    with pytest.raises(RootError) as caught:
        accept(old, envelope)
    return caught.value.code


FIRST = root(ONE)
SECOND = next_root(FIRST, now=NOW + 1)
TWO_OF_THREE = root(ONE, TWO, THREE, threshold=2)


def test_a_root_says_the_same_after_a_journey() -> None:
    assert parse_root(FIRST.body()) == FIRST
    assert open_first(sealed(FIRST, ONE)) == FIRST
    assert accept(FIRST, sealed(SECOND, ONE)) == SECOND


@pytest.mark.parametrize("version", [1, 3, 7])
def test_versions_rise_by_one(version: int) -> None:
    assert code(FIRST, sealed(replace(SECOND, version=version), ONE)) == "VERSION"


def test_both_roots_thresholds_must_sign() -> None:
    handed_over = next_root(FIRST, now=NOW + 1, role=Role.ROOT, public_keys=[TWO.public_pem])
    assert code(FIRST, sealed(handed_over, ONE)) == "NEW_THRESHOLD"
    assert code(FIRST, sealed(handed_over, TWO)) == "OLD_THRESHOLD"
    assert code(FIRST, sealed(handed_over, THREE)) == "OLD_THRESHOLD"
    both = accept(FIRST, add_signatures(sealed(handed_over, ONE), [TWO]))
    assert both.roles[Role.ROOT].key_ids == (TWO.key_id,)
    assert code(both, sealed(next_root(both, now=NOW + 2), ONE)) == "OLD_THRESHOLD"


def test_a_threshold_counts_keys() -> None:
    new = next_root(TWO_OF_THREE, now=NOW + 1)
    assert code(TWO_OF_THREE, sealed(new, ONE)) == "OLD_THRESHOLD"
    assert accept(TWO_OF_THREE, sealed(new, ONE, THREE)) == new
    # A higher threshold is the new root's own to meet.
    more = next_root(TWO_OF_THREE, now=NOW + 1, role=Role.ROOT, public_keys=[], keep=True, threshold=3)
    assert code(TWO_OF_THREE, sealed(more, ONE, TWO)) == "NEW_THRESHOLD"


def test_one_key_under_two_ids_never_counts_twice() -> None:
    """The library that verifies counts ids; so a root in which an id is not the key's own does not exist."""
    value = json.loads(TWO_OF_THREE.body())
    value["keys"][TWO.key_id] = ONE.public_pem.decode()
    with pytest.raises(RootError, match="not its own"):
        parse_root(canonical(value))
    # The same signature under another id of the role.
    envelope = json.loads(sealed(next_root(TWO_OF_THREE, now=NOW + 1), ONE))
    envelope["signatures"].append(dict(envelope["signatures"][0], keyid=TWO.key_id))
    assert code(TWO_OF_THREE, json.dumps(envelope).encode()) == "OLD_THRESHOLD"
    # Another text of the same key is the same key.
    spaced = ONE.public_pem.replace(b"\n", b"\r\n")
    assert len(next_root(FIRST, now=NOW, role=Role.ROOT, public_keys=[spaced], keep=True).roles[Role.ROOT].key_ids) == 1


def _changed(change: Callable[[dict], object]) -> bytes:
    value = json.loads(SECOND.body())
    change(value)
    return sign_envelope(PAYLOAD_TYPE, canonical(value), ONE)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.pop("ended"),
        lambda v: v.update(more=1),
        lambda v: v.update(schema="loraport.trust-root.v2"),
        lambda v: v.update(version=0),
        lambda v: v.update(version=True),
        lambda v: v.update(keys=[]),
        lambda v: v.update(roles=[]),
        lambda v: v.update(roles=None),
        lambda v: v.update(ended={"a": 1}),
        lambda v: v.update(expires=v["issued"]),
        lambda v: v.update(expires=v["issued"] + 3 * 366 * 86400),
        lambda v: v["roles"].pop("loader"),
        lambda v: v["roles"].update(extra=v["roles"]["loader"]),
        lambda v: v["roles"]["root"].update(threshold=2),
        lambda v: v["roles"]["root"].update(threshold=0),
        lambda v: v["roles"]["root"].update(threshold=True),
        lambda v: v["roles"]["root"].update(keys=[]),
        lambda v: v["roles"]["root"].update(keys=v["roles"]["root"]["keys"] * 2),
        lambda v: v["roles"]["registry"].update(keys=["0" * 64]),
        lambda v: v["keys"].update({THREE.key_id: THREE.public_pem.decode()}),
        lambda v: v["keys"].update({THREE.key_id: "no key"}),
        lambda v: v["keys"].update({THREE.key_id: 7}),
        lambda v: v["ended"].append({"key": "0" * 64, "role": "loader", "since": 1, "until": 1, "reason": ""}),
        lambda v: v["ended"].append({"key": v["roles"]["root"]["keys"][0], "role": "root"}),
        lambda v: v["ended"].append(7),
    ],
)  # fmt: skip
def test_a_root_of_another_form_is_none(change: Callable[[dict], object]) -> None:
    assert code(FIRST, _changed(change)) == "MALFORMED"


def test_an_envelope_of_another_kind_is_none() -> None:
    body = SECOND.body()
    assert code(FIRST, sign_envelope("application/other", body, ONE)) == "PAYLOAD_TYPE"
    assert code(FIRST, b"{") == "MALFORMED"
    assert code(FIRST, b" " * (257 << 10)) == "TOO_LARGE"
    assert code(FIRST, sign_envelope(PAYLOAD_TYPE, b" " + body, ONE)) == "MALFORMED"


def test_time_goes_on() -> None:
    assert code(FIRST, sealed(replace(SECOND, issued=NOW - 1), ONE)) == "TIME"
    require_current(FIRST, now=FIRST.expires)
    with pytest.raises(RootError, match="EXPIRED"):
        require_current(FIRST, now=FIRST.expires + 1)


def test_expiry_matters_for_the_last_root_only() -> None:
    old = replace(FIRST, issued=1, expires=2)
    chain = [sealed(replace(next_root(old, now=3), expires=4), ONE)]
    chain.append(sealed(next_root(accept(old, chain[0]), now=NOW), ONE))
    last = verify_chain(old, chain)
    require_current(last, now=NOW)
    with pytest.raises(RootError, match="EXPIRED"):
        require_current(verify_chain(old, chain[:1]), now=NOW)


def test_a_chain_has_no_gap_and_an_end() -> None:
    roots, envelopes = [FIRST], []
    for _ in range(MAX_ROTATIONS + 1):
        roots.append(next_root(roots[-1], now=NOW))
        envelopes.append(sealed(roots[-1], ONE))
    assert verify_chain(FIRST, envelopes[:MAX_ROTATIONS]).version == MAX_ROTATIONS + 1
    with pytest.raises(RootError, match="CHAIN_TOO_LONG"):
        verify_chain(FIRST, envelopes)
    with pytest.raises(RootError, match="VERSION"):
        verify_chain(FIRST, [*envelopes[:3], *envelopes[4:6]])
    with pytest.raises(RootError, match="VERSION"):
        verify_chain(roots[5], envelopes[:2])


def replaced(*, compromised: bool = False, since: int = 40) -> TrustRoot:
    return next_root(
        FIRST, now=NOW + 5, role=Role.REGISTRY, public_keys=[TWO.public_pem], since=since, compromised=compromised
    )  # fmt: skip


@pytest.mark.parametrize(
    ("index", "believed"), [(1, True), (39, True), (40, False), (41, False), (0, False), (-1, False)]
)
def test_an_ended_key_counts_for_what_was_logged_before(index: int, believed: bool) -> None:
    old, new = ONLINE[Role.REGISTRY].key_id, TWO.key_id
    for compromised in (False, True):
        after = replaced(compromised=compromised)
        assert after.accepts("registry", old, index) is believed
        assert after.accepts("registry", new, index)
        assert (old in after.trusted("registry", index)) is believed
        assert not after.accepts("loader", old, index)


def test_what_is_in_no_log_outlives_a_replaced_key_a_little_and_a_leaked_one_not_at_all() -> None:
    old = ONLINE[Role.REGISTRY].key_id
    assert replaced().accepts("registry", old, now=NOW + 5 + GRACE_S - 1)
    assert not replaced().accepts("registry", old, now=NOW + 5 + GRACE_S)
    assert not replaced().accepts("registry", old)
    assert not replaced(compromised=True).accepts("registry", old, now=NOW + 5)


def test_a_replaced_key_may_turn_out_to_have_leaked() -> None:
    old, after = ONLINE[Role.REGISTRY].key_id, replaced()
    worse = leaked_earlier(after, old, since=7, now=NOW + 6)
    assert accept(after, sealed(worse, ONE)) == worse
    assert [worse.accepts("registry", old, index) for index in (6, 7, 39)] == [True, False, False]
    assert not worse.accepts("registry", old, now=NOW + 6)
    assert leaked_earlier(worse, old, since=8, now=NOW + 9).ended == worse.ended, "never for more again"
    with pytest.raises(RootError, match="has not ended"):
        leaked_earlier(after, TWO.key_id, since=7, now=NOW + 6)


@pytest.mark.parametrize("reason", ["replaced\n  ended for router: nothing", "\x1b[2A\x1b[2K", "\u202e", "a\x07"])
def test_what_is_shown_to_a_holder_steers_no_terminal(reason: str) -> None:
    root = next_root(
        FIRST, now=NOW, role=Role.REGISTRY, public_keys=[TWO.public_pem], since=1, reason=reason
    )  # fmt: skip
    assert code(FIRST, sealed(root, ONE)) == "MALFORMED"


def test_what_has_ended_stays_ended() -> None:
    after = replaced()
    forgiven = next_root(after, now=NOW + 6)
    for ended in ((), (replace(after.ended[0], since=41),), (replace(after.ended[0], until=NOW + 9999),)):
        keys = forgiven.keys if ended else {k: v for k, v in forgiven.keys.items() if k != after.ended[0].key_id}
        assert code(after, sealed(replace(forgiven, ended=ended, keys=keys), ONE)) == "REVIVED"
    # It may turn out that it leaked earlier.
    worse = replace(forgiven, ended=(replace(after.ended[0], since=3, until=0),))
    assert accept(after, sealed(worse, ONE)) == worse
    # Back among the role's keys.
    with pytest.raises(RootError, match="has ended"):
        next_root(after, now=NOW, role=Role.REGISTRY, public_keys=[ONLINE[Role.REGISTRY].public_pem])
    both = RoleKeys(key_ids=tuple(sorted([TWO.key_id, after.ended[0].key_id])))
    assert code(after, sealed(replace(forgiven, roles={**forgiven.roles, Role.REGISTRY: both}), ONE)) == "MALFORMED"
