"""What stops when a key turns out not to have been its owner's any more, from one leaf of the log on.

    a publisher's key   what it announced from that leaf on      → QUARANTINED, SIGNER_REVOKED; such a version is not
                                                                   the adapter's latest any more
    a loader's key      what it verified from that leaf on       → QUARANTINED, VERIFIER_REVOKED
    the registry's key  the records that it signed from there on → VERIFIED, RECORD_WITHDRAWN: approve again

What stands before that leaf in the log was signed while the key was good; the log proves when. Every move is a leaf and
an audit event of its own. Finding them reads the log from that leaf on: it is done rarely, and then nothing may be
missed, so there is no index that could be wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from sqlalchemy import Connection

from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, EnvelopeError, verify_envelope
from loraport.log.leaf import Kind, Leaf, parse_leaf
from loraport.trust.root import Ended, Role, TrustRoot
from services.registry import moving
from services.registry.catalog import Move
from services.registry.lifecycle import Event, State, after
from services.registry.records import RevisionRow
from services.registry.store import adapters, delegations, journal, log, revisions
from services.registry.store.database import Transaction
from services.shared.names import parse_revision, tenant_name
from services.shared.statements import Record, StatementError, Verification, open_statement

BATCH = 1000


def stop_announced(transaction: Transaction, tenant: str, *, since: int, signer: str, now_us: int) -> int:
    """Stops what the tenant's signers no longer stand behind; returns how many revisions."""
    connection = transaction.connection
    rows = delegations.keys_at(connection, tenant)

    def stands(row: RevisionRow, leaf: Leaf) -> bool:
        threshold = delegations.newest(connection, tenant, before=leaf.index).threshold
        envelope, trusted = revisions.manifest_envelope(connection, row), delegations.counting(rows, leaf.index)
        try:
            verify_envelope(envelope, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted=trusted, threshold=threshold)
        except EnvelopeError:
            return False
        return True

    detail = f"signer {signer} is revoked since log index {since}"
    reason = ("SIGNER_REVOKED", detail, f"{tenant_name(tenant)}/signers/{signer}")
    leaves = [leaf for leaf in _leaves(connection, since, Kind.ANNOUNCED) if _of(leaf, tenant)]
    fallen = _fallen(connection, leaves, stands)
    struck: dict[int, set[int]] = {}
    for row in fallen:
        struck.setdefault(row.adapter_id, set()).add(row.version)
    for adapter_id, versions in struck.items():
        adapters.lower_latest(transaction, adapter_id, versions)
    return _stop(transaction, fallen, Event.DISTRUST, reason, now_us=now_us)


def stop_ended(transaction: Transaction, old: TrustRoot, new: TrustRoot, *, now_us: int) -> int:
    """Stops what the keys that have ended by `new` no longer stand behind; returns how many revisions."""
    return sum(
        _stop_role(transaction, new, item, now_us=now_us)
        for item in new.ended
        if item not in old.ended and item.role in (Role.LOADER, Role.REGISTRY)
    )


def _stop_role(transaction: Transaction, root: TrustRoot, ended: Ended, *, now_us: int) -> int:
    connection = transaction.connection
    detail = f"key {ended.key_id} ended for the role {ended.role} since log index {ended.since}"

    def verified(row: RevisionRow, leaf: Leaf) -> bool:
        envelope = revisions.verification_envelope(connection, row)
        # A key that was merely replaced was good for what it had begun.
        if envelope is None or sha256_digest(envelope) != leaf.digest or ended.until > root.issued:
            return True
        return _opens(Verification, envelope, root.trusted(Role.LOADER, leaf.index))

    def recorded(row: RevisionRow, leaf: Leaf) -> bool:
        if row.state is not State.ACTIVE or row.record_leaf != leaf.index:
            return True
        return _opens(Record, row.record_envelope, root.trusted(Role.REGISTRY, leaf.index))

    if ended.role == Role.LOADER:
        leaves, reason = _leaves(connection, ended.since, Kind.VERIFIED), ("VERIFIER_REVOKED", detail, "")
        return _stop(transaction, _fallen(connection, leaves, verified), Event.DISTRUST, reason, now_us=now_us)
    leaves, reason = _leaves(connection, ended.since, Kind.RECORD), ("RECORD_WITHDRAWN", detail, "")
    return _stop(transaction, _fallen(connection, leaves, recorded), Event.WITHDRAW, reason, now_us=now_us)


def _fallen(
    connection: Connection, leaves: Iterable[Leaf], stands: Callable[[RevisionRow, Leaf], bool]
) -> list[RevisionRow]:
    """Returns the rows that leaves are about and that do not stand, each once, whatever their state."""
    fallen = {}
    for leaf in leaves:
        name, version = parse_revision(leaf.resource)
        row = revisions.find_version(connection, name, version)
        if row is not None and not stands(row, leaf):
            fallen[row.name] = row
    return list(fallen.values())


def _stop(
    transaction: Transaction, rows: list[RevisionRow], event: Event, reason: tuple[str, str, str], *, now_us: int
) -> int:
    count = 0
    for row in rows:
        if not row.current or row.state is State.REVOKED:
            continue
        to = after(row.state, event)
        if to is row.state:
            continue
        move = Move(state=to, changed=True, reasons=(*row.reasons, reason), warnings=row.warnings)
        moving.release(transaction, row.revision_id, f"{row.name} is stopped: {reason[1]}", now_us=now_us)
        revisions.move(transaction, row, move, now_us=now_us)
        journal.add_event(
            transaction,
            now_us=now_us,
            principal="registry",
            method="stop",
            resource=row.name,
            decision="allowed",
            reason=reason[0],
            request_id="",
        )
        count += 1
    return count


def _leaves(connection: Connection, start: int, kind: Kind) -> Iterator[Leaf]:
    while rows := log.list_leaves(connection, start=start, limit=BATCH - 1):
        yield from (leaf for leaf in (parse_leaf(body) for _, body in rows) if leaf.kind == kind)
        start = rows[-1][0] + 1


def _of(leaf: Leaf, tenant: str) -> bool:
    return leaf.resource.startswith(f"{tenant_name(tenant)}/")


def _opens(kind: type[Record] | type[Verification], envelope: bytes, trusted: Mapping[str, bytes]) -> bool:
    try:
        open_statement(kind, envelope, trusted)
    except StatementError:
        return False
    return True
