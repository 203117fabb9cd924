"""The trust root: which keys speak for which role, one signed version after another. Pure.

    root       signs the next root; offline, thresholds above 1 are meant for it
    registry   records, upload sessions, delegations to publishers
    loader     verification results
    router     tickets
    timestamp  checkpoints

A key's id is computed from the key, so one key cannot count twice. A key that is replaced or has leaked stays in the
root as *ended* for its role: what is in the log before index `since` was signed while the key was good, and stays
good; what is short-lived (tickets, sessions, checkpoints, verification results) is taken from it until `until`.

`accept` decides on the next root, by these rules in this order:

| rule | code when it is broken |
| --- | --- |
| the envelope is one, of this payload type, not too large | the codes of `loraport.bundle.envelope` |
| a threshold of the *old* root's root keys signed it | OLD_THRESHOLD |
| canonical JSON, exactly these fields, every key under its own id, every role with keys and a threshold | MALFORMED |
| its version is the old one plus one | VERSION |
| a threshold of *its own* root keys signed it | NEW_THRESHOLD |
| it was not issued before the old one | TIME |
| what has ended stays ended, and not later than it did | REVIVED |

Expiry matters for the last root of a chain only (`require_current`): a chain may be older than its parts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict
from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import MAX_ENVELOPE_BYTES, EnvelopeError, claimed_payload, key_id, verify_envelope

SCHEMA = "loraport.trust-root.v1"
PAYLOAD_TYPE = "application/vnd.loraport.trust-root+json"
MAX_ROTATIONS = 256
MAX_ROLE_KEYS = 16
MAX_ENDED = 512
MAX_LIFE_S = 2 * 366 * 86400
MAX_REASON = 200


class Role(StrEnum):
    """Who signs what; see the module's text."""

    ROOT = "root"
    REGISTRY = "registry"
    LOADER = "loader"
    ROUTER = "router"
    TIMESTAMP = "timestamp"


class RootError(ValueError):
    """A root that is not accepted; `code` is of the module's table, or EXPIRED or CHAIN_TOO_LONG."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleKeys:
    """The ids of a role's keys, sorted, and how many of them must sign."""

    key_ids: tuple[str, ...]
    threshold: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A key that speaks for a role no longer: not for what stands at log index `since` or later, and for what is in
    no log not from `until` on (seconds since the Unix epoch)."""

    key_id: str
    role: str
    since: int
    until: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRoot:
    """One version. Times are seconds since the Unix epoch; `keys` maps key ids to public keys in PEM."""

    version: int
    issued: int
    expires: int
    keys: Mapping[str, str]
    roles: Mapping[Role, RoleKeys]
    ended: tuple[Ended, ...] = ()

    def accepts(self, role: str, key: str, log_index: int | None = None, *, now: float | None = None) -> bool:
        """Says whether a key's signature counts for a role.

        With `log_index`, for a statement that is in the log at that place, which the caller has had proven; without,
        for one that is in no log, at the time `now`. Index 0 is never a record's and stands for an unknown place.
        """
        if key in self.roles[Role(role)].key_ids:
            return True
        ended = next((item for item in self.ended if (item.role, item.key_id) == (role, key)), None)
        if ended is None:
            return False
        if log_index is not None:
            return 0 < log_index < ended.since
        return now is not None and now < ended.until

    def trusted(self, role: str, log_index: int | None = None, *, now: float | None = None) -> dict[str, bytes]:
        """Returns key id → PEM of the keys that `accepts` accepts."""
        return {
            key: pem.encode("ascii") for key, pem in self.keys.items() if self.accepts(role, key, log_index, now=now)
        }

    def body(self) -> bytes:
        """Returns the canonical JSON that is signed."""
        return canonical(
            {
                "schema": SCHEMA,
                "version": self.version,
                "issued": self.issued,
                "expires": self.expires,
                "keys": dict(self.keys),
                "roles": {
                    str(role): {"keys": list(of_role.key_ids), "threshold": of_role.threshold}
                    for role, of_role in self.roles.items()
                },
                "ended": [
                    {
                        "key": item.key_id,
                        "role": str(item.role),
                        "since": item.since,
                        "until": item.until,
                        "reason": item.reason,
                    }
                    for item in self.ended
                ],
            }
        )

    @property
    def digest(self) -> str:
        """The digest of what is signed: two roots are one when it is equal, whoever signed them."""
        return sha256_digest(self.body())


def parse_root(payload: bytes) -> TrustRoot:
    """Returns the root of a payload, whoever signed it.

    Raises:
        RootError: MALFORMED.
    """
    try:
        value = load_strict(payload, max_bytes=MAX_ENVELOPE_BYTES, max_depth=4)
        if canonical(value) != payload:
            raise RootError("MALFORMED", "not in canonical form")
        return _root(value)
    except StrictJsonError as error:
        raise RootError("MALFORMED", str(error)) from None
    except (KeyError, TypeError, AttributeError):
        raise RootError("MALFORMED", "fields are missing or have the wrong type") from None


def open_first(envelope: bytes) -> TrustRoot:
    """Returns a root that is trusted for another reason than a root before it, such as where it was read from.

    Raises:
        RootError: MALFORMED, NEW_THRESHOLD, or a code of the envelope.
    """
    root = parse_root(_claimed(envelope))
    _require(root, envelope, "NEW_THRESHOLD", "its own root keys")
    return root


def accept(old: TrustRoot, envelope: bytes) -> TrustRoot:
    """Returns the root in `envelope` if it follows `old` by the module's table.

    Raises:
        RootError: with the code of the first rule that is broken.
    """
    payload = _claimed(envelope)
    _require(old, envelope, "OLD_THRESHOLD", f"the root keys of version {old.version}")
    new = parse_root(payload)
    if new.version != old.version + 1:
        raise RootError("VERSION", f"version {new.version} does not follow version {old.version}")
    _require(new, envelope, "NEW_THRESHOLD", "its own root keys")
    if new.issued < old.issued:
        raise RootError("TIME", "it was issued before the version that it follows")
    _require_no_revival(old, new)
    return new


def verify_chain(first: TrustRoot, envelopes: Iterable[bytes]) -> TrustRoot:
    """Returns the last root of a chain that follows `first`; nothing is said about its expiry.

    Raises:
        RootError: CHAIN_TOO_LONG, or what `accept` says of the first link that is bad.
    """
    root = first
    for count, envelope in enumerate(envelopes, start=1):
        if count > MAX_ROTATIONS:
            raise RootError("CHAIN_TOO_LONG", f"more than {MAX_ROTATIONS} roots at once")
        root = accept(root, envelope)
    return root


def require_current(root: TrustRoot, *, now: float) -> None:
    """Raises RootError (EXPIRED) when the newest root is of the past."""
    if now > root.expires:
        raise RootError("EXPIRED", f"trust root {root.version} has expired; sign a new one")


def _claimed(envelope: bytes) -> bytes:
    try:
        return claimed_payload(envelope, payload_type=PAYLOAD_TYPE)
    except EnvelopeError as error:
        raise RootError(error.code, error.detail) from None


def _require(root: TrustRoot, envelope: bytes, code: str, whose: str) -> None:
    of_root = root.roles[Role.ROOT]
    trusted = {key: root.keys[key] for key in of_root.key_ids}
    try:
        verify_envelope(envelope, payload_type=PAYLOAD_TYPE, trusted=trusted, threshold=of_root.threshold)
    except EnvelopeError as error:
        if error.code != "UNTRUSTED":
            raise RootError(error.code, error.detail) from None
        raise RootError(code, f"not signed by {of_root.threshold} of {whose}") from None


def _require_no_revival(old: TrustRoot, new: TrustRoot) -> None:
    still = {(item.role, item.key_id): item for item in new.ended}
    for item in old.ended:
        now = still.get((item.role, item.key_id))
        if now is None or now.since > item.since or now.until > item.until:
            raise RootError("REVIVED", f"key {item.key_id} ended for the role {item.role}, and would count again")


def _root(value: Any) -> TrustRoot:
    if set(value) != {"schema", "version", "issued", "expires", "keys", "roles", "ended"} or value["schema"] != SCHEMA:
        raise RootError("MALFORMED", "fields are missing or unknown")
    numbers = (value["version"], value["issued"], value["expires"])
    if not all(type(number) is int and number >= 1 for number in numbers):
        raise RootError("MALFORMED", "version and times must be positive integers")
    if not 0 < value["expires"] - value["issued"] <= MAX_LIFE_S:
        raise RootError("MALFORMED", f"it must live at most {MAX_LIFE_S // 86400} days")
    keys = {name: _key(name, pem) for name, pem in value["keys"].items()}
    if set(value["roles"]) != set(Role):
        raise RootError("MALFORMED", f"the roles must be {', '.join(Role)}")
    roles = {Role(name): _role(name, of_role) for name, of_role in value["roles"].items()}
    ended = tuple(_ended(item) for item in value["ended"])
    if len(ended) > MAX_ENDED or len({(item.role, item.key_id) for item in ended}) < len(ended):
        raise RootError("MALFORMED", f"at most {MAX_ENDED} keys have ended, each once for a role")
    if any(item.key_id in roles[Role(item.role)].key_ids for item in ended):
        raise RootError("MALFORMED", "a key that has ended for a role is among its keys")
    named = {key for of_role in roles.values() for key in of_role.key_ids} | {item.key_id for item in ended}
    if named != set(keys):
        raise RootError("MALFORMED", "the keys must be exactly those that the roles and the ended keys name")
    return TrustRoot(
        version=value["version"],
        issued=value["issued"],
        expires=value["expires"],
        keys=keys,
        roles=roles,
        ended=ended,
    )


def _key(name: str, pem: Any) -> str:
    try:
        if not isinstance(pem, str) or not pem.isascii() or key_id(pem) != name:
            raise RootError("MALFORMED", f"the key {name!r:.66} is under an id that is not its own")
    except EnvelopeError as error:
        raise RootError("MALFORMED", f"the key {name!r:.66} is {error.detail}") from None
    return pem


def _role(name: str, value: Any) -> RoleKeys:
    if set(value) != {"keys", "threshold"} or not all(isinstance(key, str) for key in value["keys"]):
        raise RootError("MALFORMED", f"the role {name} must have keys and a threshold")
    keys, threshold = tuple(value["keys"]), value["threshold"]
    if list(keys) != sorted(set(keys)) or not 1 <= len(keys) <= MAX_ROLE_KEYS:
        raise RootError("MALFORMED", f"the role {name} must have 1 to {MAX_ROLE_KEYS} different keys, sorted")
    if type(threshold) is not int or not 1 <= threshold <= len(keys):
        raise RootError("MALFORMED", f"the threshold of the role {name} must be in [1, {len(keys)}]")
    if name != Role.ROOT and threshold != 1:
        # A service signs with the one key that it holds.
        raise RootError("MALFORMED", f"the threshold of the role {name} must be 1")
    return RoleKeys(key_ids=keys, threshold=threshold)


def _ended(value: Any) -> Ended:
    if set(value) != {"key", "role", "since", "until", "reason"} or value["role"] not in set(Role) - {Role.ROOT}:
        raise RootError("MALFORMED", "an ended key has a key, a role other than root, since, until and a reason")
    numbers = all(type(value[name]) is int and value[name] >= 0 for name in ("since", "until"))
    texts = isinstance(value["key"], str) and isinstance(value["reason"], str)
    if not numbers or not texts or len(value["reason"]) > MAX_REASON or not value["reason"].isprintable():
        raise RootError("MALFORMED", "an ended key has a field of the wrong form")
    return Ended(
        key_id=value["key"],
        role=value["role"],
        since=value["since"],
        until=value["until"],
        reason=value["reason"],
    )
