"""A leaf of the transparency log: what happened to what, as canonical JSON. Pure.

    {"digest": "sha256:…", "index": 4, "kind": "RECORD", "previous": "<64 hex>", "resource": "tenants/…",
     "schema": "loraport.log-leaf.v1", "time": 1800000000}

`digest` is of what was signed or set: see `Kind`. `previous` is the hash of the leaf before, 64 zeros in the first one.
The tree proves more than this chain does; the chain says *which* row of a copy was changed.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict
from loraport.bundle.digest import is_digest

SCHEMA = "loraport.log-leaf.v1"
FIRST = "0" * 64
MAX_LEAF_BYTES = 4096
_HASH = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"digest", "index", "kind", "previous", "resource", "schema", "time"}


class Kind(StrEnum):
    """What a leaf says, and of what its digest is."""

    BASE_MODEL = "BASE_MODEL"  # the base id
    SIGNER_CREATED = "SIGNER_CREATED"  # the key id
    SIGNER_REVOKED = "SIGNER_REVOKED"  # the key id
    API_KEY_CREATED = "API_KEY_CREATED"  # the stored hash of its secret
    API_KEY_REVOKED = "API_KEY_REVOKED"  # the stored hash of its secret
    ANNOUNCED = "ANNOUNCED"  # the publisher's envelope
    VERIFIED = "VERIFIED"  # the loader's envelope; when a record was withdrawn, the revision id
    QUARANTINED = "QUARANTINED"  # the loader's envelope; when superseded or distrusted, the revision id
    RECORD = "RECORD"  # the registry's envelope: the revision was approved
    REVOKED = "REVOKED"  # the revision id
    ALIAS_SET = "ALIAS_SET"  # the revision id that it points to
    ALIAS_DELETED = "ALIAS_DELETED"  # the revision id that it pointed to
    SHARED = "SHARED"  # the canonical list of the tenants it is shared with
    AUDITED = "AUDITED"  # the hash of the audit event that the resource, auditEvents/{sequence}, names
    TRUST_ROOT = "TRUST_ROOT"  # the signed root
    ROLLOUT = "ROLLOUT"  # the canonical JSON of a rollout's move: what it says, from where to where, by whom
    DELEGATED = "DELEGATED"  # the registry's envelope: which signers count for a tenant, and how many are needed


# What takes something out of service: peers should hear of these at once.
REVOCATIONS = frozenset({Kind.REVOKED, Kind.SIGNER_REVOKED, Kind.API_KEY_REVOKED, Kind.TRUST_ROOT})


class LeafError(ValueError):
    """Bytes that are no leaf; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One leaf. `time` is seconds since the Unix epoch."""

    index: int
    time: int
    kind: str
    resource: str
    digest: str
    previous: str

    def body(self) -> bytes:
        """Returns the canonical JSON that is hashed."""
        return canonical(
            {
                "schema": SCHEMA,
                "index": self.index,
                "time": self.time,
                "kind": str(self.kind),
                "resource": self.resource,
                "digest": self.digest,
                "previous": self.previous,
            }
        )


def parse_leaf(body: bytes) -> Leaf:
    """Returns the leaf of a body.

    A kind that this release does not know is kept as it is: an older auditor reads a newer log.

    Raises:
        LeafError: it is not the canonical JSON of a leaf.
    """
    try:
        value = load_strict(body, max_bytes=MAX_LEAF_BYTES, max_depth=1)
        if canonical(value) != body:
            raise LeafError("not in canonical form")
    except StrictJsonError as error:
        raise LeafError(error.code) from None
    if not isinstance(value, dict) or set(value) != _FIELDS or value["schema"] != SCHEMA:
        raise LeafError("fields are missing or unknown")
    numbers = all(type(value[name]) is int and value[name] >= 0 for name in ("index", "time"))
    texts = all(isinstance(value[name], str) for name in ("kind", "resource", "previous", "digest"))
    if not numbers or not texts or not is_digest(value["digest"]) or not _HASH.fullmatch(value["previous"]):
        raise LeafError("a field has the wrong form")
    return Leaf(**{name: value[name] for name in _FIELDS - {"schema"}})
