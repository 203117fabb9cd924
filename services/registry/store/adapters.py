"""Adapters and their aliases."""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Integer, Select, bindparam, insert, select, update

from loraport.log.leaf import Kind
from loraport.log.replay import shared_digest
from services.registry.records import AdapterRow, AliasRow, RevisionRow
from services.registry.store import log
from services.registry.store.database import Transaction
from services.registry.store.rows import build, build_all, build_optional, page
from services.registry.store.tables import adapters, aliases, revisions, tenants
from services.shared.errors import LoraportError
from services.shared.names import AdapterName
from services.shared.paging import Key

_ADAPTER = select(adapters).where(adapters.c.tenant == bindparam("tenant"), adapters.c.adapter == bindparam("adapter"))
_AFTER = ("after_tenant", "after_adapter")
_ADD = insert(adapters).returning(adapters.c.adapter_id)
_RENEW = (
    update(adapters)
    .where(adapters.c.adapter_id == bindparam("row"))
    .values(latest_version=bindparam("version"), base_model=bindparam("base"))
)
_ALIASES = (
    select(aliases)
    .where(aliases.c.adapter_id == bindparam("adapter_id"), aliases.c.removed.is_(False))
    .order_by(aliases.c.alias)
)


def find_adapter(connection: Connection, name: AdapterName) -> AdapterRow | None:
    """Returns an adapter, or None."""
    key = {"tenant": name.tenant, "adapter": name.adapter}
    return build_optional(AdapterRow, connection.execute(_ADAPTER, key).first())


def require_adapter(connection: Connection, name: AdapterName) -> AdapterRow:
    """Returns an adapter. Raises LoraportError (ADAPTER_NOT_FOUND)."""
    row = find_adapter(connection, name)
    if row is None:
        raise LoraportError("ADAPTER_NOT_FOUND", missing(connection, name))
    return row


def missing(connection: Connection, name: AdapterName) -> str:
    """Returns which part of an adapter's name is unknown, in words for an admin; empty when none is."""
    if find_adapter(connection, name) is not None:
        return ""
    owner = connection.execute(select(tenants.c.tenant).where(tenants.c.tenant == name.tenant)).first()
    return f"there is no tenant {name.tenant}" if owner is None else f"{name.tenant} has no adapter {name.adapter}"


def list_adapters(
    connection: Connection, tenant: str | None, *, after: Key | None, limit: int
) -> list[tuple[AdapterRow, list[AliasRow]]]:
    """Returns a page of adapters by name, of one tenant or of all (None), and one more; with each its aliases."""
    wanted, with_aliases = _pages(tenant is not None, after is not None)
    values = {"tenant": tenant, "limit": limit, **dict(zip(_AFTER, after or (), strict=False))}
    rows = build_all(AdapterRow, connection.execute(wanted, values))
    found: dict[int, list[AliasRow]] = {row.adapter_id: [] for row in rows}
    for alias in build_all(AliasRow, connection.execute(with_aliases, values)):
        found[alias.adapter_id].append(alias)
    return [(row, found[row.adapter_id]) for row in rows]


@cache
def _pages(one_tenant: bool, later: bool) -> tuple[Select[Any], Select[Any]]:
    """Returns the queries of a page of adapters and of its aliases.

    The second one asks for the page again rather than for its ids: to bind hundreds of values takes longer than to
    find them.
    """
    statement = select(adapters)
    if one_tenant:
        statement = statement.where(adapters.c.tenant == bindparam("tenant"))
    key = (adapters.c.tenant, adapters.c.adapter)
    after = tuple(bindparam(name, type_=column.type) for name, column in zip(_AFTER, key, strict=True))
    wanted = page(statement, key, after=after if later else None, limit=bindparam("limit", type_=Integer))
    of_page = aliases.c.adapter_id.in_(wanted.with_only_columns(adapters.c.adapter_id))
    return wanted, select(aliases).where(of_page, aliases.c.removed.is_(False)).order_by(aliases.c.alias)


def put_adapter(transaction: Transaction, existing: AdapterRow | None, row: RevisionRow) -> int:
    """Notes the newest version and base of an adapter, which is added when there is none; returns its row id."""
    connection = transaction.connection
    if existing is not None:
        key = {"row": existing.adapter_id, "version": row.version, "base": row.base_model}
        connection.execute(_RENEW, key)
        return existing.adapter_id
    values = {
        "tenant": row.tenant,
        "adapter": row.adapter,
        "base_model": row.base_model,
        "latest_version": row.version,
        "shared_tenants": [],
        "create_us": row.create_us,
    }
    return int(connection.execute(_ADD, values).scalar_one())


def lower_latest(transaction: Transaction, adapter_id: int, struck: Collection[int]) -> None:
    """Makes the highest version that is not `struck`, nor was before, an adapter's latest, or the last of those that
    follow it without a gap: the number after the latest is free."""
    connection = transaction.connection
    rows = connection.execute(
        select(revisions.c.version, revisions.c.reasons)
        .where(revisions.c.adapter_id == adapter_id)
        .order_by(revisions.c.version.desc())
    ).all()
    latest = next((version for version, reasons in rows if version not in struck and not _stopped(reasons)), 0)
    taken = {version for version, _ in rows}
    while latest + 1 in taken:
        latest += 1
    of_adapter = adapters.c.adapter_id == adapter_id
    connection.execute(update(adapters).where(of_adapter).values(latest_version=latest))


def _stopped(reasons: Sequence[Sequence[str]]) -> bool:
    return any(code == "SIGNER_REVOKED" for code, *_ in reasons)


def share(transaction: Transaction, row: AdapterRow, tenants: tuple[str, ...], *, now_us: int) -> AdapterRow:
    """Lets `tenants` (sorted) and nobody else use an adapter besides its owner."""
    change = update(adapters).where(adapters.c.adapter_id == row.adapter_id).values(shared_tenants=list(tenants))
    shared = build(AdapterRow, transaction.connection.execute(change.returning(adapters)).one())
    # Watchers hear of it revision by revision.
    of_adapter = revisions.c.adapter_id == row.adapter_id
    transaction.connection.execute(update(revisions).where(of_adapter).values(epoch=transaction.epoch()))
    log.append(transaction, Kind.SHARED, resource=str(row.name), digest=shared_digest(tenants), now_us=now_us)
    return shared


def aliases_of(connection: Connection, row: AdapterRow) -> list[AliasRow]:
    """Returns an adapter's aliases by name."""
    return build_all(AliasRow, connection.execute(_ALIASES, {"adapter_id": row.adapter_id}))


def find_alias(connection: Connection, adapter_id: int, alias: str) -> AliasRow | None:
    """Returns an alias, a removed one as well, or None."""
    statement = select(aliases).where(aliases.c.adapter_id == adapter_id, aliases.c.alias == alias)
    return build_optional(AliasRow, connection.execute(statement).first())


def put_alias(transaction: Transaction, adapter: AdapterRow, alias: str, target: RevisionRow, now_us: int) -> AliasRow:
    """Points an alias at a revision, adding it if need be."""
    values = {
        "revision_id": target.revision_id,
        "version": target.version,
        "removed": False,
        "update_us": now_us,
        "epoch": transaction.epoch(),
    }
    if find_alias(transaction.connection, adapter.adapter_id, alias) is not None:
        of_alias = (aliases.c.adapter_id == adapter.adapter_id) & (aliases.c.alias == alias)
        statement = update(aliases).where(of_alias).values(values).returning(aliases)
        return _logged(transaction, Kind.ALIAS_SET, build(AliasRow, transaction.connection.execute(statement).one()))
    key = {"adapter_id": adapter.adapter_id, "alias": alias, "tenant": adapter.tenant, "adapter": adapter.adapter}
    addition = insert(aliases).values(key | values).returning(aliases)
    return _logged(transaction, Kind.ALIAS_SET, build(AliasRow, transaction.connection.execute(addition).one()))


def remove_alias(transaction: Transaction, row: AliasRow, *, now_us: int) -> AliasRow:
    """Removes an alias; a tombstone stays for the watchers."""
    of_alias = (aliases.c.adapter_id == row.adapter_id) & (aliases.c.alias == row.alias)
    change = update(aliases).where(of_alias).values(removed=True, update_us=now_us, epoch=transaction.epoch())
    removed = build(AliasRow, transaction.connection.execute(change.returning(aliases)).one())
    return _logged(transaction, Kind.ALIAS_DELETED, removed)


def _logged(transaction: Transaction, kind: Kind, row: AliasRow) -> AliasRow:
    log.append(transaction, kind, resource=row.name, digest=row.revision_id, now_us=row.update_us)
    return row
