"""Adapters and their aliases."""

from collections.abc import Sequence

from sqlalchemy import Connection, insert, select, update

from loraport.bundle.canonical import canonical
from loraport.bundle.digest import sha256_digest
from loraport.log.leaf import Kind
from services.registry.records import AdapterRow, AliasRow, RevisionRow
from services.registry.store import log
from services.registry.store.database import Transaction
from services.registry.store.rows import build, build_all, build_optional, page
from services.registry.store.tables import adapters, aliases, revisions
from services.shared.errors import LoraportError
from services.shared.names import AdapterName
from services.shared.paging import Key


def find_adapter(connection: Connection, name: AdapterName) -> AdapterRow | None:
    """Returns an adapter, or None."""
    statement = select(adapters).where(adapters.c.tenant == name.tenant, adapters.c.adapter == name.adapter)
    return build_optional(AdapterRow, connection.execute(statement).first())


def require_adapter(connection: Connection, name: AdapterName) -> AdapterRow:
    """Returns an adapter. Raises LoraportError (ADAPTER_NOT_FOUND)."""
    row = find_adapter(connection, name)
    if row is None:
        raise LoraportError("ADAPTER_NOT_FOUND", f"there is no adapter {name}")
    return row


def list_adapters(connection: Connection, tenant: str | None, *, after: Key | None, limit: int) -> list[AdapterRow]:
    """Returns a page of adapters by name, of one tenant or of all (None), and one more."""
    statement = select(adapters)
    if tenant is not None:
        statement = statement.where(adapters.c.tenant == tenant)
    key = (adapters.c.tenant, adapters.c.adapter)
    return build_all(AdapterRow, connection.execute(page(statement, key, after=after, limit=limit)))


def put_adapter(transaction: Transaction, name: AdapterName, *, base_model: str, version: int, now_us: int) -> int:
    """Notes an adapter's newest version and base, adding the adapter if need be; returns its row id."""
    existing = find_adapter(transaction.connection, name)
    if existing is not None:
        change = update(adapters).where(adapters.c.adapter_id == existing.adapter_id)
        transaction.connection.execute(change.values(latest_version=version, base_model=base_model))
        return existing.adapter_id
    addition = insert(adapters).values(
        tenant=name.tenant,
        adapter=name.adapter,
        base_model=base_model,
        latest_version=version,
        shared_tenants=[],
        create_us=now_us,
    )
    return int(transaction.connection.execute(addition.returning(adapters.c.adapter_id)).scalar_one())


def share(transaction: Transaction, row: AdapterRow, tenants: tuple[str, ...], *, now_us: int) -> AdapterRow:
    """Lets `tenants` (sorted) and nobody else use an adapter besides its owner."""
    change = update(adapters).where(adapters.c.adapter_id == row.adapter_id).values(shared_tenants=list(tenants))
    shared = build(AdapterRow, transaction.connection.execute(change.returning(adapters)).one())
    # Watchers hear of it revision by revision.
    of_adapter = revisions.c.adapter_id == row.adapter_id
    transaction.connection.execute(update(revisions).where(of_adapter).values(epoch=transaction.epoch()))
    digest = sha256_digest(canonical(list(tenants)))
    log.append(transaction, Kind.SHARED, resource=str(row.name), digest=digest, now_us=now_us)
    return shared


def aliases_of(connection: Connection, adapter_ids: Sequence[int]) -> dict[int, list[AliasRow]]:
    """Returns the aliases of several adapters, each list ordered by name, in one query."""
    statement = (
        select(aliases)
        .where(aliases.c.adapter_id.in_(adapter_ids), aliases.c.removed.is_(False))
        .order_by(aliases.c.adapter_id, aliases.c.alias)
    )
    found: dict[int, list[AliasRow]] = {adapter_id: [] for adapter_id in adapter_ids}
    for row in build_all(AliasRow, connection.execute(statement)):
        found[row.adapter_id].append(row)
    return found


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
