"""The catalog as peers receive it: everything, in bounded chunks, and what changed since an epoch."""

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Row, Select, Table, select

from services.registry.records import RolloutRow
from services.registry.rollout.machine import LOST
from services.registry.rollout.settings import Prompt
from services.registry.rollout.states import State
from services.registry.store.database import Database
from services.registry.store.rollouts import rollout_row
from services.registry.store.rows import page
from services.registry.store.tables import (
    adapters,
    aliases,
    api_keys,
    base_models,
    catalog_state,
    log_leaves,
    log_restrictions,
    revisions,
    rollouts,
    tenants,
    trust_roots,
)
from services.shared.catalog import (
    AliasItem,
    BaseItem,
    Item,
    KeyItem,
    PromptItem,
    RestrictionItem,
    RevisionItem,
    RolloutItem,
    RootItem,
    TenantItem,
)
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


def _restriction(row: Row[Any]) -> Item:
    return RestrictionItem(row.position, bytes(row.body))


def _alias(row: Row[Any]) -> Item:
    return AliasItem(row.tenant, row.adapter, row.alias, "" if row.removed else row.revision_id)


def _rollout(row: Row[Any]) -> Item:
    return rollout_item(rollout_row(row))


def rollout_item(row: RolloutRow) -> RolloutItem:
    """Returns a rollout as peers see it: prompts and the shadow's share only while they are of use; prompts also where
    it is held in PROBING for want of a probe, which comes only from those who have them."""
    position, settings = row.position, row.settings
    # What may have taken an executor down is not tried on the others meanwhile.
    probing = position.at is State.PROBING and position.hold_reason != LOST
    return RolloutItem(
        name=row.name,
        tenant=row.tenant,
        adapter=row.adapter,
        alias=row.alias,
        salt=row.salt,
        from_revision_id=row.from_revision_id,
        to_revision_id=row.to_revision_id,
        base_model=row.base_model,
        state=str(position.state),
        share_basis_points=row.share,
        step_index=position.step,
        shadow_basis_points=settings.shadow if position.state is State.SHADOWING else 0,
        generation=row.generation,
        ended=position.ended,
        golden_prompts=tuple(map(_prompt, settings.golden)) if probing else (),
        eval_prompts=tuple(map(_prompt, settings.evals)) if probing else (),
    )


def _prompt(prompt: Prompt) -> PromptItem:
    return PromptItem(prompt.text, prompt.token_ids)


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
# Before what they restrict: in between, nothing is allowed that will not be.
_RESTRICTIONS: tuple[Kind, ...] = (
    (
        log_restrictions,
        select(log_restrictions.c.position, log_leaves.c.body).join(
            log_leaves, log_leaves.c.leaf_index == log_restrictions.c.leaf_index
        ),
        (log_restrictions.c.position,),
        _restriction,
    ),
)
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
    (rollouts, select(rollouts), (rollouts.c.rollout_row,), _rollout),
)
# A full state leaves out what only a watcher that saw it before has to hear of.
_OVER: dict[Table, ColumnElement[bool]] = {rollouts: rollouts.c.running.is_(False)}


def kinds(*, artefacts_only: bool) -> tuple[Kind, ...]:
    """Returns what a watcher hears of, in the order of a full state."""
    accounts = () if artefacts_only else _ACCOUNTS
    return (*_TRUST, *_RESTRICTIONS, *accounts, *_ARTEFACTS)


def scan(database: Database, kind: Kind) -> Iterator[list[Item]]:
    """Gives every item of a kind in chunks, each read by itself, so that a slow reader holds nothing open.

    Chunks of different moments do not fit together until `changes` since a moment before the first chunk is added.
    """
    table, statement, key, convert = kind
    if table in _OVER:
        statement = statement.where(~_OVER[table])
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
            for table, statement, key, convert in kinds(artefacts_only=artefacts_only):
                changed = statement.where(table.c.epoch > since).order_by(table.c.epoch, *key)
                items.extend(convert(row) for row in connection.execute(changed))
    return epoch, items


def _epoch(connection: Connection) -> int:
    return int(connection.execute(select(catalog_state.c.epoch)).scalar_one())
