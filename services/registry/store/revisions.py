"""Revisions and their documents. Every change is a leaf of the log, whoever makes it."""

from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, text, update

from loraport.bundle.digest import sha256_digest
from loraport.log.leaf import Kind
from services.registry.catalog import Move
from services.registry.lifecycle import State
from services.registry.records import Findings, RevisionRow
from services.registry.store import log
from services.registry.store.database import Transaction
from services.registry.store.rows import build, build_all, build_optional, page
from services.registry.store.tables import adapters, revision_documents, revisions
from services.shared.errors import LoraportError
from services.shared.names import AdapterName
from services.shared.paging import Key

_INSERT, _INSERT_DOCUMENT = insert(revisions), insert(revision_documents)
# The condition must be the partial index's, word for word: SQLite does not see that `current IS 1` implies it, and
# would read the whole table.
_CURRENT = select(revisions).where(revisions.c.revision_id == bindparam("revision_id"), text("revisions.current"))
_VERSION = (
    select(revisions)
    .join(adapters, adapters.c.adapter_id == revisions.c.adapter_id)
    .where(
        adapters.c.tenant == bindparam("tenant"),
        adapters.c.adapter == bindparam("adapter"),
        revisions.c.version == bindparam("version"),
    )
)
_MANIFEST = select(revision_documents.c.manifest_envelope).where(
    revision_documents.c.adapter_id == bindparam("adapter_id"), revision_documents.c.version == bindparam("version")
)


def find_current(connection: Connection, revision_id: str) -> RevisionRow | None:
    """Returns the newest announcement of some content, or None."""
    return build_optional(RevisionRow, connection.execute(_CURRENT, {"revision_id": revision_id}).first())


def find_version(connection: Connection, name: AdapterName, version: int) -> RevisionRow | None:
    """Returns one announcement, superseded or not, or None."""
    key = {"tenant": name.tenant, "adapter": name.adapter, "version": version}
    return build_optional(RevisionRow, connection.execute(_VERSION, key).first())


def require(row: RevisionRow | None) -> RevisionRow:
    """Returns `row`. Raises LoraportError (REVISION_NOT_FOUND) for None."""
    if row is None:
        raise LoraportError("REVISION_NOT_FOUND")
    return row


def count_states(connection: Connection) -> dict[str, int]:
    """Returns how many announcements are in each state."""
    state = revisions.c.state
    return {str(name): int(count) for name, count in connection.execute(select(state, func.count()).group_by(state))}


def list_revisions(connection: Connection, adapter_id: int, *, after: Key | None, limit: int) -> list[RevisionRow]:
    """Returns a page of an adapter's revisions, newest version first, and one more."""
    statement = select(revisions).where(revisions.c.adapter_id == adapter_id)
    key = (revisions.c.version,)
    return build_all(RevisionRow, connection.execute(page(statement, key, after=after, limit=limit, descending=True)))


def manifest_envelope(connection: Connection, row: RevisionRow) -> bytes:
    """Returns the publisher's envelope of a revision."""
    key = {"adapter_id": row.adapter_id, "version": row.version}
    return bytes(connection.execute(_MANIFEST, key).scalar_one())


def add(transaction: Transaction, row: RevisionRow, *, adapter_id: int, envelope: bytes) -> RevisionRow:
    """Adds an announcement and its envelope; returns the row with its adapter and epoch."""
    row = row._replace(adapter_id=adapter_id, epoch=transaction.epoch())
    values = {column.name: getattr(row, column.name) for column in revisions.columns}
    values |= {"reasons": _json(row.reasons), "warnings": _json(row.warnings), "state": str(row.state)}
    transaction.connection.execute(_INSERT, values)
    document = {"adapter_id": row.adapter_id, "version": row.version, "manifest_envelope": envelope}
    transaction.connection.execute(_INSERT_DOCUMENT, document | {"verification_envelope": None})
    _log(transaction, row, Kind.ANNOUNCED, envelope, now_us=row.create_us)
    return row


def supersede(transaction: Transaction, row: RevisionRow, *, state: str, reasons: Findings, now_us: int) -> None:
    """Makes a row history: another announcement of its content becomes the current one."""
    _update(transaction, row, {"current": False, "state": state, "reasons": _json(reasons), "update_us": now_us})
    _log(transaction, row, Kind.QUARANTINED, None, now_us=now_us)


def move(
    transaction: Transaction, row: RevisionRow, to: Move, *, now_us: int, evidence: bytes | None = None
) -> RevisionRow:
    """Moves a revision to another state; returns it as it is then.

    `evidence` is the signed envelope that says so: the loader's, or the registry's record, which is kept in the row for
    as long as the revision is ACTIVE: what is not there cannot be shown by mistake.
    """
    leaf = _log(transaction, row, _KINDS[to.state], evidence, now_us=now_us)
    values: dict[str, Any] = {
        "state": str(to.state),
        "reasons": _json(to.reasons),
        "warnings": _json(to.warnings),
        "update_us": now_us,
    }
    if to.state is State.ACTIVE and evidence is not None:
        values |= {"record_envelope": evidence, "record_leaf": leaf}
    elif to.state is not State.ACTIVE:
        values |= {"record_envelope": b"", "record_leaf": 0}
    return _update(transaction, row, values)


def verification_envelope(connection: Connection, row: RevisionRow) -> bytes | None:
    """Returns the loader's envelope of a revision, if it sent one."""
    statement = select(revision_documents.c.verification_envelope).where(
        revision_documents.c.adapter_id == row.adapter_id, revision_documents.c.version == row.version
    )
    envelope = connection.execute(statement).scalar_one()
    return None if envelope is None else bytes(envelope)


def keep_verification(transaction: Transaction, row: RevisionRow, envelope: bytes) -> None:
    """Keeps the loader's envelope beside the publisher's."""
    of_row = (revision_documents.c.adapter_id == row.adapter_id) & (revision_documents.c.version == row.version)
    change = update(revision_documents).where(of_row).values(verification_envelope=envelope)
    transaction.connection.execute(change)


def _update(transaction: Transaction, row: RevisionRow, values: dict[str, Any]) -> RevisionRow:
    of_row = (revisions.c.adapter_id == row.adapter_id) & (revisions.c.version == row.version)
    change = update(revisions).where(of_row).values(values | {"epoch": transaction.epoch()}).returning(revisions)
    return build(RevisionRow, transaction.connection.execute(change).one())


_KINDS = {
    State.VERIFIED: Kind.VERIFIED,
    State.QUARANTINED: Kind.QUARANTINED,
    State.ACTIVE: Kind.RECORD,
    State.REVOKED: Kind.REVOKED,
}


def _log(transaction: Transaction, row: RevisionRow, kind: Kind, evidence: bytes | None, *, now_us: int) -> int:
    digest = row.revision_id if evidence is None else sha256_digest(evidence)
    return log.append(transaction, kind, resource=row.name, digest=digest, now_us=now_us)


def _json(findings: Findings) -> list[list[str]]:
    return [list(finding) for finding in findings]
