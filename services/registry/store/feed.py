"""The catalog as peers receive it: everything, in bounded chunks, and what changed since an epoch."""

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Column, Connection, Row, Select, Table, select

from services.registry.store.database import Database
from services.registry.store.rows import page
from services.registry.store.tables import (
    adapters,
    aliases,
    api_keys,
    base_models,
    catalog_state,
    revisions,
    tenants,
    trust_roots,
)
from services.shared.catalog import AliasItem, BaseItem, Item, KeyItem, RevisionItem, RootItem, TenantItem
from services.shared.quotas import Quota

CHUNK = 1000
_NOBODY: frozenset[str] = frozenset()


def _tenant(row: Row[Any]) -> Item:
    return TenantItem(row.tenant, row.weight, row.base_allowed, Quota(**row.quota))


def _key(row: Row[Any]) -> Item:
    expires = None if row.expire_us is None else row.expire_us / 1e6
    return KeyItem(
        row.key_id, row.tenant, bytes(row.secret_hmac), frozenset(row.scopes), expires, row.revoke_us is not None
    )


def _base(row: Row[Any]) -> Item:
    return BaseItem(row.base_model, row.base_id)


def _revision(row: Row[Any]) -> Item:
    # By position: there are many, and by name they took twice as long.
    revision_id, tenant, adapter, version, state, base_model, weights, size, rank, record, leaf, shared, *_ = row
    who = frozenset(shared) if shared else _NOBODY
    return RevisionItem(
        revision_id, tenant, adapter, version, state, base_model, weights, size, rank, bytes(record), who, leaf
    )


def _root(row: Row[Any]) -> Item:
    return RootItem(row.version, bytes(row.envelope))


def _alias(row: Row[Any]) -> Item:
    return AliasItem(row.tenant, row.adapter, row.alias, "" if row.removed else row.revision_id)


# As `_revision` takes them; then what paging and changes go by.
_REVISION_COLUMNS = [
    *(
        revisions.c[name]
        for name in (
            "revision_id", "tenant", "adapter", "version", "state", "base_model", "weights_digest", "size_bytes",
            "max_rank", "record_envelope", "record_leaf",
        )
    ),
    adapters.c.shared_tenants,
    revisions.c.adapter_id,
    revisions.c.epoch,
]  # fmt: skip

Kind = tuple[Table, Select[Any], tuple[Column[Any], ...], Callable[[Row[Any]], Item]]

# Before anything that is signed by a key that it names.
_TRUST: tuple[Kind, ...] = ((trust_roots, select(trust_roots), (trust_roots.c.version,), _root),)
# Names before what refers to them. Superseded announcements are history and are not told.
_ACCOUNTS: tuple[Kind, ...] = (
    (tenants, select(tenants), (tenants.c.tenant,), _tenant),
    (api_keys, select(api_keys), (api_keys.c.key_id,), _key),
)
_ARTEFACTS: tuple[Kind, ...] = (
    (
        base_models,
        select(base_models.c.base_model, base_models.c.base_id, base_models.c.epoch),
        (base_models.c.base_model,),
        _base,
    ),
    (
        revisions,
        select(*_REVISION_COLUMNS)
        .join(adapters, adapters.c.adapter_id == revisions.c.adapter_id)
        .where(revisions.c.current.is_(True)),
        (revisions.c.adapter_id, revisions.c.version),
        _revision,
    ),
    (aliases, select(aliases), (aliases.c.adapter_id, aliases.c.alias), _alias),
)


def kinds(*, artefacts_only: bool) -> tuple[Kind, ...]:
    """Returns what a watcher hears of, in the order of a full state."""
    return (*_TRUST, *_ARTEFACTS) if artefacts_only else (*_TRUST, *_ACCOUNTS, *_ARTEFACTS)


def scan(database: Database, kind: Kind) -> Iterator[list[Item]]:
    """Gives every item of a kind in chunks, each read by itself, so that a slow reader holds nothing open.

    Chunks of different moments do not fit together until `changes` since a moment before the first chunk is added.
    """
    _, statement, key, convert = kind
    after: tuple[Any, ...] | None = None
    while True:
        with database.read() as connection:
            rows = connection.execute(page(statement, key, after=after, limit=CHUNK)).all()
        if rows:
            yield [convert(row) for row in rows[:CHUNK]]
        if len(rows) <= CHUNK:
            return
        after = tuple(rows[CHUNK - 1]._mapping[column.name] for column in key)


def changes(database: Database, since: int, *, artefacts_only: bool) -> tuple[int, list[Item]]:
    """Returns the newest epoch and what changed after the epoch `since`, as of one moment."""
    items: list[Item] = []
    with database.read() as connection:
        epoch = _epoch(connection)
        if epoch > since:
            for table, statement, _, convert in kinds(artefacts_only=artefacts_only):
                changed = statement.where(table.c.epoch > since).order_by(table.c.epoch)
                items.extend(convert(row) for row in connection.execute(changed))
    return epoch, items


def _epoch(connection: Connection) -> int:
    return int(connection.execute(select(catalog_state.c.epoch)).scalar_one())
