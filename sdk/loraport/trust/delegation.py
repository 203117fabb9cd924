"""What the registry says of a tenant's publishers: whose signatures count, and how many are needed. Pure.

The root names services; it cannot be signed anew for every publisher of every tenant. So the role registry delegates:
one signed statement per tenant and change, versions rising by one, each a leaf of the log.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict
from loraport.bundle.envelope import MAX_ENVELOPE_BYTES, EnvelopeError, Signer, sign_envelope, verify_envelope

SCHEMA = "loraport.delegation.v1"
PAYLOAD_TYPE = "application/vnd.loraport.delegation+json"
MAX_THRESHOLD = 16


class DelegationError(ValueError):
    """A statement that proves nothing; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """A signer: `valid` for what is announced now; `since` is the leaf from which on its announcements do not count."""

    signer: str
    key_id: str
    valid: bool
    since: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegation:
    """The statement. `issued` is seconds since the Unix epoch; publishers are sorted by name."""

    tenant: str
    version: int
    threshold: int
    publishers: tuple[Publisher, ...]
    issued: int


def seal_delegation(delegation: Delegation, key: Signer) -> bytes:
    """Returns the signed envelope."""
    value = {
        "schema": SCHEMA,
        "tenant": delegation.tenant,
        "version": delegation.version,
        "threshold": delegation.threshold,
        "issued": delegation.issued,
        "publishers": [
            {"signer": item.signer, "key": item.key_id, "valid": item.valid, "since": item.since}
            for item in delegation.publishers
        ],
    }
    return sign_envelope(PAYLOAD_TYPE, canonical(value), key)


def open_delegation(envelope: bytes, trusted: Mapping[str, bytes]) -> Delegation:
    """Returns the statement in `envelope`, signed by one of `trusted` (key id → PEM).

    Raises:
        DelegationError: the signature, the form or the fields are not what they must be.
    """
    try:
        payload = verify_envelope(envelope, payload_type=PAYLOAD_TYPE, trusted=trusted)
        value = load_strict(payload, max_bytes=MAX_ENVELOPE_BYTES, max_depth=3)
        if canonical(value) != payload or value["schema"] != SCHEMA:
            raise DelegationError("not in canonical form, or of another schema")
        return _delegation(value)
    except (EnvelopeError, StrictJsonError) as error:
        raise DelegationError(error.code) from None
    except (KeyError, TypeError):
        raise DelegationError("fields are missing or have the wrong type") from None


def _delegation(value: Any) -> Delegation:
    publishers = tuple(
        Publisher(signer=item["signer"], key_id=item["key"], valid=item["valid"], since=item["since"])
        for item in value["publishers"]
    )
    numbers = [value["version"], value["threshold"], value["issued"]]
    numbers += [item.since for item in publishers if item.since is not None]
    if not all(type(number) is int and number >= 0 for number in numbers) or not 1 <= numbers[1] <= MAX_THRESHOLD:
        raise DelegationError("a number is out of range")
    return Delegation(
        tenant=value["tenant"],
        version=value["version"],
        threshold=value["threshold"],
        publishers=publishers,
        issued=value["issued"],
    )
