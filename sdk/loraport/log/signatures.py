"""What an auditor asks of signatures: the log's trust roots are one chain, and its records are signed by it. Pure.

ROOT       a TRUST_ROOT leaf is not the next version of the chain, or the chain has a version that the log lacks
SIGNATURE  a record is not the one that the log took in, or no key signed it that the root of that place names and
           that counts for that place still
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import EnvelopeError, verify_envelope
from loraport.log.audit import Finding
from loraport.log.leaf import Kind, Leaf
from loraport.trust.root import Role, TrustRoot

RECORD_TYPE = "application/vnd.loraport.record+json"


@dataclass(frozen=True, slots=True)
class Placed:
    """A root of a chain that was verified, its envelope, and its leaf's index; -1 for one from before the log."""

    root: TrustRoot
    envelope: bytes
    log_index: int


def place(chain: Sequence[tuple[TrustRoot, bytes]], leaves: Iterable[Leaf]) -> tuple[list[Placed], Finding | None]:
    """Finds the roots of a chain in the log.

    Leaves of versions before the chain's first are not looked at: whoever trusts that one does not need them.
    """
    known = {root.version: (root, envelope) for root, envelope in chain}
    first = chain[0][0].version
    placed = [Placed(chain[0][0], chain[0][1], -1)]
    expected = None
    for leaf in leaves:
        if leaf.kind != Kind.TRUST_ROOT:
            continue
        number = leaf.resource.removeprefix("trustRoots/")
        version = int(number) if number.isascii() and number.isdigit() else 0
        if expected is not None and version != expected:
            detail = f"{leaf.resource} stands where version {expected} should be"
            return placed, Finding(code="ROOT", index=leaf.index, detail=detail)
        expected = version + 1
        if version < first:
            continue
        if version not in known or sha256_digest(known[version][1]) != leaf.digest:
            detail = f"{leaf.resource} is not the trust root that follows in the chain"
            return placed, Finding(code="ROOT", index=leaf.index, detail=detail)
        item = Placed(*known[version], leaf.index)
        placed = [item] if version == first else [*placed, item]
    missing = [root.version for root, _ in chain[1:] if expected is not None and root.version >= expected]
    if missing:
        detail = f"trust root {missing[0]} is not in the log"
        return placed, Finding(code="ROOT", index=placed[-1].log_index + 1, detail=detail)
    return placed, None


def record_finding(leaf: Leaf, envelope: bytes, placed: Sequence[Placed]) -> Finding | None:
    """Returns what is wrong with the record of a RECORD leaf."""
    if sha256_digest(envelope) != leaf.digest:
        detail = f"the record of {leaf.resource} is not the one that the log took in"
        return Finding(code="SIGNATURE", index=leaf.index, detail=detail)
    then = [item.root for item in placed if item.log_index < leaf.index] or [placed[0].root]
    counting = placed[-1].root.trusted(Role.REGISTRY, leaf.index)
    trusted = {key: pem for key, pem in counting.items() if key in then[-1].roles[Role.REGISTRY].key_ids}
    try:
        verify_envelope(envelope, payload_type=RECORD_TYPE, trusted=trusted)
    except EnvelopeError as error:
        detail = f"the record of {leaf.resource} is not signed by a key that counts at this place: {error.code}"
        return Finding(code="SIGNATURE", index=leaf.index, detail=detail)
    return None
