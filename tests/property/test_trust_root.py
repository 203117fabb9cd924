"""Laws of the chain of trust roots, over rotations that nobody thought of."""

import contextlib
import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraport.bundle.envelope import SigningKey
from loraport.trust.edit import first_root, next_root
from loraport.trust.root import Role, RootError, TrustRoot, accept, parse_root, verify_chain
from tests.support.roots import NOW, sealed

# Keys are slow to make; which ones they are does not matter.
KEYS = tuple(SigningKey.generate() for _ in range(8))
NAMES = {key.key_id: key for key in KEYS}
ONLINE = tuple(role for role in Role if role != Role.ROOT)


@dataclass(frozen=True)
class Rotation:
    role: Role | None
    keys: frozenset[int]
    keep: bool
    threshold: int
    since: int
    compromised: bool


rotations = st.builds(
    Rotation,
    role=st.sampled_from([None, *Role]),
    keys=st.frozensets(st.integers(0, 7), min_size=1, max_size=3),
    keep=st.booleans(),
    threshold=st.integers(1, 3),
    since=st.integers(1, 100),
    compromised=st.booleans(),
)


def first() -> TrustRoot:
    return first_root({role: [KEYS[0].public_pem] for role in Role}, now=NOW)


def turn(old: TrustRoot, rotation: Rotation) -> TrustRoot | None:
    """The next root of a rotation; None for one that is not possible."""
    threshold = rotation.threshold if rotation.role == Role.ROOT else None
    try:
        new = next_root(
            old, now=old.issued + 1, role=rotation.role, public_keys=[KEYS[i].public_pem for i in rotation.keys],
            keep=rotation.keep, threshold=threshold, since=rotation.since, compromised=rotation.compromised,
        )  # fmt: skip
        return parse_root(new.body())
    except RootError:
        return None


def holders(root: TrustRoot) -> list[SigningKey]:
    return [NAMES[key] for key in root.roles[Role.ROOT].key_ids]


def chain(turns: list[Rotation]) -> tuple[list[TrustRoot], list[bytes]]:
    roots, envelopes = [first()], []
    for rotation in turns:
        new = turn(roots[-1], rotation)
        if new is not None:
            envelopes.append(sealed(new, *{key.key_id: key for key in holders(roots[-1]) + holders(new)}.values()))
            roots.append(new)
    return roots, envelopes


@settings(max_examples=60)
@given(turns=st.lists(rotations, max_size=8), data=st.data())
def test_only_the_whole_chain_in_order_is_accepted(turns: list[Rotation], data: st.DataObject) -> None:
    roots, envelopes = chain(turns)
    assert verify_chain(roots[0], envelopes) == roots[-1]
    picked = data.draw(st.permutations(range(len(envelopes))))
    cut = data.draw(st.integers(0, len(envelopes)))
    order = picked[:cut]
    if order != list(range(len(order))):
        with pytest.raises(RootError):
            verify_chain(roots[0], [envelopes[i] for i in order])


@settings(max_examples=80)
@given(turns=st.lists(rotations, max_size=5), last=rotations, signers=st.frozensets(st.integers(0, 7), min_size=1))
def test_a_root_is_accepted_exactly_when_both_thresholds_signed(
    turns: list[Rotation], last: Rotation, signers: frozenset[int]
) -> None:
    old = chain(turns)[0][-1]
    new = turn(old, last)
    if new is None:
        return
    ids = {KEYS[i].key_id for i in signers}

    def met(root: TrustRoot) -> bool:
        return len(ids & set(root.roles[Role.ROOT].key_ids)) >= root.roles[Role.ROOT].threshold

    envelope = sealed(new, *(KEYS[i] for i in signers))
    if met(old) and met(new):
        assert accept(old, envelope) == new
    else:
        with pytest.raises(RootError, match="THRESHOLD"):
            accept(old, envelope)


@settings(max_examples=60)
@given(turns=st.lists(rotations, min_size=1, max_size=8))
def test_no_rotation_makes_an_ended_key_count_for_more(turns: list[Rotation]) -> None:
    roots, _ = chain(turns)
    for before, after in itertools.pairwise(roots):
        for item in before.ended:
            for index in range(0, 102):
                assert not after.accepts(item.role, item.key_id, index) or before.accepts(item.role, item.key_id, index)
            assert not after.accepts(item.role, item.key_id, now=item.until)


@settings(max_examples=80)
@given(turns=st.lists(rotations, max_size=3), bit=st.integers(min_value=0))
def test_a_flipped_bit_is_never_accepted_as_another_root(turns: list[Rotation], bit: int) -> None:
    old = chain(turns)[0][-1]
    new = replace(next_root(old, now=old.issued + 1))
    envelope = bytearray(sealed(new, *holders(old)))
    envelope[bit // 8 % len(envelope)] ^= 1 << bit % 8
    with contextlib.suppress(RootError):
        assert accept(old, bytes(envelope)) == new
