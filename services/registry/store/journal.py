"""What was done: audit events, and the results that request ids stand for."""

import re
from dataclasses import asdict

from sqlalchemy import Connection, delete, insert, select

from loraport.log.events import FIRST, Event, anchor_name, event_hash
from loraport.log.leaf import Kind
from services.registry.records import AuditRow
from services.registry.store import log
from services.registry.store.database import Transaction
from services.registry.store.rows import build_all, page
from services.registry.store.tables import audit_events, request_results
from services.shared.errors import LoraportError
from services.shared.names import is_id
from services.shared.paging import Key

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_INSERT = insert(audit_events)
_NEWEST = select(audit_events.c.sequence, audit_events.c.hash).order_by(audit_events.c.sequence.desc()).limit(1)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def add_event(
    transaction: Transaction,
    *,
    now_us: int,
    principal: str,
    method: str,
    resource: str,
    decision: str,
    reason: str,
    request_id: str,
) -> None:
    """Adds an audit event to the chain. Texts are cut to their columns and control characters are replaced.

    Writers take turns, so that the newest event is still the newest when this one follows it.
    """
    parts = resource.split("/")
    tenant = parts[1] if len(parts) > 1 and parts[0] == "tenants" and is_id(parts[1]) else ""
    newest = transaction.connection.execute(_NEWEST).first()
    sequence, previous = (newest.sequence, bytes(newest.hash)) if newest is not None else (0, FIRST)
    event = Event(
        sequence=sequence + 1,
        time_us=now_us,
        principal=_clean(principal, 256),
        method=_clean(method, 128),
        resource=_clean(resource, 512),
        decision=decision,
        reason=_clean(reason, 512),
        request_id=_clean(request_id, 64),
    )
    values = {name: value for name, value in asdict(event).items() if name != "time_us"}
    values |= {"event_us": now_us, "tenant": tenant, "hash": event_hash(previous, event)}
    transaction.connection.execute(_INSERT, values)


def anchor(transaction: Transaction, *, after: int, now_us: int) -> int:
    """Names the newest event in a leaf of the log if its sequence is above `after`; returns that sequence."""
    newest = transaction.connection.execute(_NEWEST).first()
    if newest is None or newest.sequence <= after:
        return after
    digest = f"sha256:{bytes(newest.hash).hex()}"
    log.append(transaction, Kind.AUDITED, resource=anchor_name(newest.sequence), digest=digest, now_us=now_us)
    return int(newest.sequence)


def list_events(connection: Connection, tenant: str, *, after: Key | None, limit: int) -> list[AuditRow]:
    """Returns a page of events, newest first, of one tenant or of all (empty), and one more."""
    statement = select(audit_events)
    if tenant:
        statement = statement.where(audit_events.c.tenant == tenant)
    key = (audit_events.c.sequence,)
    return build_all(AuditRow, connection.execute(page(statement, key, after=after, limit=limit, descending=True)))


def recall(
    connection: Connection, principal: str, method: str, request_id: str, *, request_digest: str
) -> bytes | None:
    """Returns the response that a request id stands for, or None when it is new.

    Raises:
        LoraportError: INVALID_REQUEST, the id was used for a request of other content.
    """
    row = connection.execute(
        select(request_results.c.request_digest, request_results.c.response).where(
            request_results.c.principal == principal,
            request_results.c.method == method,
            request_results.c.request_id == request_id,
        )
    ).first()
    if row is None:
        return None
    if row.request_digest != request_digest:
        raise LoraportError("INVALID_REQUEST", "request_id was used for another request", subject="request_id")
    return bytes(row.response)


def remember(
    transaction: Transaction,
    principal: str,
    method: str,
    request_id: str,
    *,
    request_digest: str,
    response: bytes,
    now_us: int,
    life_us: int,
) -> None:
    """Keeps the response of a request id, and forgets those that are older than `life_us`."""
    transaction.connection.execute(delete(request_results).where(request_results.c.create_us < now_us - life_us))
    transaction.connection.execute(
        insert(request_results).values(
            principal=principal,
            method=method,
            request_id=request_id,
            request_digest=request_digest,
            create_us=now_us,
            response=response,
        )
    )


def _clean(text: str, length: int) -> str:
    return _SURROGATE.sub("�", _CONTROL.sub(" ", text))[:length]
