"""Every way in which the log's roots are no chain, or a record is not signed by a key of its place."""

from dataclasses import replace

import pytest

from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import SigningKey, sign_envelope
from loraport.log.leaf import FIRST, Kind, Leaf
from loraport.log.signatures import RECORD_TYPE, place, record_finding
from loraport.trust.edit import next_root
from loraport.trust.root import Role
from services.shared.statements import Record
from tests.support.roots import NOW, make_root, sealed

OLD, NEW, THIEF = (SigningKey.generate() for _ in range(3))
ONE = make_root({"registry": OLD})
# Version 2 is leaf 10; the old key counts up to leaf 8.
TWO = next_root(ONE, now=NOW, role=Role.REGISTRY, public_keys=[NEW.public_pem], since=8)
CHAIN = [(ONE, sealed(ONE)), (TWO, sealed(TWO))]


def leaf(index: int, resource: str, envelope: bytes, kind: Kind = Kind.TRUST_ROOT) -> Leaf:
    return Leaf(index=index, time=1, kind=kind, resource=resource, digest=sha256_digest(envelope), previous=FIRST)


GOOD = [leaf(0, "trustRoots/1", CHAIN[0][1]), leaf(3, "a", b"", Kind.ALIAS_SET), leaf(10, "trustRoots/2", CHAIN[1][1])]


def test_an_honest_log_places_the_whole_chain() -> None:
    placed, finding = place(CHAIN, GOOD)
    assert finding is None
    assert [(item.root.version, item.log_index) for item in placed] == [(1, 0), (2, 10)]
    # An auditor may have begun later.
    placed, finding = place(CHAIN[1:], GOOD)
    assert (finding, [item.log_index for item in placed]) == (None, [10])


@pytest.mark.parametrize(
    ("leaves", "index"),
    [
        ([GOOD[0], leaf(10, "trustRoots/3", CHAIN[1][1])], 10),
        ([GOOD[0], replace(GOOD[0], index=10)], 10),
        ([GOOD[0], leaf(10, "trustRoots/2", b"another")], 10),
        ([leaf(0, "trustRoots/1", b"another"), GOOD[2]], 0),
        ([*GOOD, leaf(11, "trustRoots/3", b"beyond the chain")], 11),
        ([GOOD[0], leaf(10, "trustRoots/two", CHAIN[1][1])], 10),
        ([GOOD[0]], 1),
    ],
)
def test_roots_that_are_no_chain_are_found(leaves: list[Leaf], index: int) -> None:
    finding = place(CHAIN, leaves)[1]
    assert finding is not None
    assert (finding.code, finding.index) == ("ROOT", index)


@pytest.mark.parametrize(
    ("index", "key", "good"),
    [
        (5, OLD, True),
        (7, OLD, True),
        (8, OLD, False),  # after it ended
        (9, OLD, False),
        (11, NEW, True),
        (9, NEW, False),  # before a root named it
        (11, OLD, False),
        (5, THIEF, False),
    ],
)
def test_a_record_goes_by_its_place(index: int, key: SigningKey, good: bool) -> None:
    placed, _ = place(CHAIN, GOOD)
    envelope = sign_envelope(RECORD_TYPE, b"{}", key)
    finding = record_finding(leaf(index, "r", envelope, Kind.RECORD), envelope, placed)
    assert (finding is None) is good
    other = record_finding(leaf(index, "r", b"another", Kind.RECORD), envelope, placed)
    assert other is not None
    assert other.code == "SIGNATURE"


def test_the_type_is_that_of_the_services() -> None:
    assert Record.TYPE == RECORD_TYPE
