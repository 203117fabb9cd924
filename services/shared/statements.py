"""What services sign for each other: canonical JSON in a DSSE envelope, one payload type per statement.

    ticket        router → executor    this tenant may run this revision on this base, until then
    session       registry → loader    this upload is for this revision, these bytes, until then
    verification  loader → registry    this is what the bytes of this revision are
    record        registry → all       this revision is ACTIVE for its tenant

Every `open_…` verifies the signature over the received bytes first, then requires the canonical form, then the exact
fields. Times are integers, seconds since the Unix epoch.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict
from loraport.bundle.envelope import MAX_ENVELOPE_BYTES, EnvelopeError, Signer, sign_envelope, verify_envelope

MAX_TICKET_LIFE_S = 60
CLOCK_SKEW_S = 5

TrustedKeys = Mapping[str, bytes]


class StatementError(ValueError):
    """A statement that proves nothing; the message says why, without quoting its content."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Lets requests of a tenant for a revision run. `revision_id` is empty for the base model."""

    tenant: str
    revision_id: str
    base_id: str
    expires: int

    TYPE = "application/vnd.loraport.ticket+json"


@dataclass(frozen=True, slots=True)
class UploadSession:
    """Lets one upload in. Sizes in bytes, digests `sha256:<64 hex>`."""

    upload_id: str
    tenant: str
    revision_id: str
    base_model: str
    weights_digest: str
    weights_size: int
    config_digest: str
    expires: int

    TYPE = "application/vnd.loraport.upload-session+json"


@dataclass(frozen=True, slots=True)
class Verification:
    """What the loader found. Violations and warnings are rows of (code, detail, subject)."""

    revision_id: str
    tenant: str
    base_id: str
    weights_digest: str
    weights_size: int
    admitted: bool
    violations: tuple[tuple[str, str, str], ...]
    warnings: tuple[tuple[str, str, str], ...]
    verifier: str
    verified_time: int

    TYPE = "application/vnd.loraport.verification+json"


@dataclass(frozen=True, slots=True)
class Record:
    """The registry's word that a revision may serve."""

    revision_id: str
    tenant: str
    adapter: str
    version: int
    base_id: str
    weights_digest: str
    weights_size: int
    state: str
    sequence: int
    issued_time: int

    TYPE = "application/vnd.loraport.record+json"


S = TypeVar("S", Ticket, UploadSession, Verification, Record)


def seal(statement: Ticket | UploadSession | Verification | Record, key: Signer) -> bytes:
    """Returns the signed envelope of a statement."""
    fields = {name: getattr(statement, name) for name in statement.__slots__}
    return sign_envelope(statement.TYPE, canonical(fields), key)


def open_statement(kind: type[S], envelope: bytes, trusted: TrustedKeys) -> S:
    """Returns the statement in `envelope`, signed by one of `trusted` (key id → PEM).

    Raises:
        StatementError: the signature, the form or the fields are not what they must be.
    """
    try:
        payload = verify_envelope(envelope, payload_type=kind.TYPE, trusted=trusted)
        value = load_strict(payload, max_bytes=MAX_ENVELOPE_BYTES, max_depth=4)
        if canonical(value) != payload:
            raise StatementError("not in canonical form")
    except (EnvelopeError, StrictJsonError) as error:
        raise StatementError(error.code) from None
    return _from_json(kind, value)


def open_ticket(envelope: bytes, trusted: TrustedKeys, *, now: float) -> Ticket:
    """As `open_statement`, and checks that the ticket is neither expired nor valid for too long."""
    ticket = open_statement(Ticket, envelope, trusted)
    _check_time(ticket.expires, now, MAX_TICKET_LIFE_S)
    return ticket


def open_session(envelope: bytes, trusted: TrustedKeys, *, now: float) -> UploadSession:
    """As `open_statement`, and checks that the session is not expired."""
    session = open_statement(UploadSession, envelope, trusted)
    _check_time(session.expires, now, 24 * 3600)
    return session


def _check_time(expires: int, now: float, longest: int) -> None:
    if now > expires + CLOCK_SKEW_S:
        raise StatementError("expired")
    if expires > now + longest + CLOCK_SKEW_S:
        raise StatementError("valid for too long")


def _from_json(kind: type[S], value: Any) -> S:
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    if not isinstance(value, dict) or set(value) != set(fields):
        raise StatementError("fields are missing or unknown")
    arguments: dict[str, Any] = {}
    for name, hint in fields.items():
        item = value[name]
        if hint in (str, int, bool):
            if type(item) is not hint:
                raise StatementError(f"{name} has the wrong type")
            arguments[name] = item
        else:
            arguments[name] = _rows(name, item)
    return kind(**arguments)


def _rows(name: str, value: Any) -> tuple[tuple[str, str, str], ...]:
    if not isinstance(value, list):
        raise StatementError(f"{name} has the wrong type")
    rows = []
    for row in value:
        if not isinstance(row, list) or len(row) != 3 or not all(isinstance(cell, str) for cell in row):
            raise StatementError(f"{name} has the wrong type")
        rows.append((row[0], row[1], row[2]))
    return tuple(rows)
