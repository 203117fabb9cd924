"""Tenants, their API keys and their signers."""

from collections.abc import Collection, Mapping

from sqlalchemy import Connection, bindparam, func, insert, or_, select, update

from loraport.bundle.digest import sha256_digest
from loraport.log.leaf import Kind
from services.registry.lifecycle import State
from services.registry.records import ApiKeyRow, SignerRow, TenantRow
from services.registry.store import log
from services.registry.store.database import Transaction
from services.registry.store.rows import build_all, build_optional, page
from services.registry.store.tables import adapters, api_keys, revisions, signers, tenants
from services.shared.errors import LoraportError
from services.shared.names import tenant_name
from services.shared.paging import Key
from services.shared.quotas import NO_QUOTA, Quota

_TENANT = select(tenants).where(tenants.c.tenant == bindparam("tenant"))
_ADAPTER_COUNT = select(func.count()).select_from(adapters).where(adapters.c.tenant == bindparam("tenant"))
# By way of the adapters: revisions have no index by tenant.
_STORED_BYTES = (
    select(func.sum(revisions.c.size_bytes))
    .join(adapters, adapters.c.adapter_id == revisions.c.adapter_id)
    .where(adapters.c.tenant == bindparam("tenant"), revisions.c.state != str(State.QUARANTINED))
)
_ACTIVE_SIGNERS = select(signers.c.key_id, signers.c.public_key_pem).where(
    signers.c.tenant == bindparam("tenant"), signers.c.revoke_us.is_(None)
)


def find_tenant(connection: Connection, tenant: str) -> TenantRow | None:
    """Returns a tenant, or None."""
    return build_optional(TenantRow, connection.execute(_TENANT, {"tenant": tenant}).first())


def require_tenant(connection: Connection, tenant: str) -> TenantRow:
    """Returns a tenant. Raises LoraportError (TENANT_NOT_FOUND)."""
    row = find_tenant(connection, tenant)
    if row is None:
        raise LoraportError("TENANT_NOT_FOUND", f"there is no tenant {tenant}")
    return row


def require_tenants(connection: Connection, names: Collection[str]) -> None:
    """Raises LoraportError (TENANT_NOT_FOUND) naming those that are not there."""
    found = set(connection.execute(select(tenants.c.tenant).where(tenants.c.tenant.in_(names))).scalars())
    missing = sorted(set(names) - found)
    if missing:
        raise LoraportError("TENANT_NOT_FOUND", f"there is no tenant {', '.join(missing)[:400]}")


def list_tenants(connection: Connection, *, after: Key | None, limit: int) -> list[TenantRow]:
    """Returns a page of tenants by name, and one more."""
    rows = connection.execute(page(select(tenants), (tenants.c.tenant,), after=after, limit=limit))
    return build_all(TenantRow, rows)


def add_tenant(
    transaction: Transaction,
    tenant: str,
    *,
    display_name: str,
    weight: float,
    base_allowed: bool,
    quota: Quota = NO_QUOTA,
    now_us: int,
) -> TenantRow:
    """Adds a tenant. Raises LoraportError (TENANT_EXISTS)."""
    if find_tenant(transaction.connection, tenant) is not None:
        raise LoraportError("TENANT_EXISTS", f"the tenant {tenant} exists")
    row = TenantRow(
        tenant=tenant,
        display_name=display_name,
        weight=weight,
        base_allowed=base_allowed,
        quota=quota,
        create_us=now_us,
        epoch=transaction.epoch(),
    )
    values = {column.name: getattr(row, column.name) for column in tenants.columns}
    transaction.connection.execute(insert(tenants).values(values | {"quota": quota.given()}))
    return row


def set_quota(transaction: Transaction, tenant: str, quota: Quota) -> TenantRow:
    """Sets all of a tenant's quotas and returns the tenant. Raises LoraportError (TENANT_NOT_FOUND)."""
    row = require_tenant(transaction.connection, tenant)
    if row.quota == quota:
        return row
    values = {"quota": quota.given(), "epoch": transaction.epoch()}
    change = update(tenants).where(tenants.c.tenant == tenant).values(values).returning(tenants)
    changed = build_optional(TenantRow, transaction.connection.execute(change).first())
    assert changed is not None
    return changed


def usage(connection: Connection, tenant: str) -> tuple[int, int]:
    """Returns a tenant's number of adapters, and the bytes of its revisions that are not QUARANTINED."""
    count = connection.execute(_ADAPTER_COUNT, {"tenant": tenant}).scalar_one()
    size = connection.execute(_STORED_BYTES, {"tenant": tenant}).scalar_one()
    return int(count), int(size or 0)


def add_api_key(transaction: Transaction, row: ApiKeyRow) -> None:
    """Adds an API key; the caller has checked the tenant."""
    values = {column.name: getattr(row, column.name) for column in api_keys.columns}
    transaction.connection.execute(insert(api_keys).values(values | {"scopes": list(row.scopes)}))
    _log_key(transaction, Kind.API_KEY_CREATED, row, now_us=row.create_us)


def list_api_keys(connection: Connection, tenant: str, *, after: Key | None, limit: int) -> list[ApiKeyRow]:
    """Returns a page of a tenant's keys, oldest first, and one more."""
    statement = select(api_keys).where(api_keys.c.tenant == tenant)
    key = (api_keys.c.create_us, api_keys.c.key_id)
    return build_all(ApiKeyRow, connection.execute(page(statement, key, after=after, limit=limit)))


def require_api_key(connection: Connection, tenant: str, key_id: str) -> ApiKeyRow:
    """Returns a key of a tenant. Raises LoraportError (KEY_NOT_FOUND)."""
    of_key = (api_keys.c.key_id == key_id) & (api_keys.c.tenant == tenant)
    row = build_optional(ApiKeyRow, connection.execute(select(api_keys).where(of_key)).first())
    if row is None:
        raise LoraportError("KEY_NOT_FOUND", f"tenants/{tenant} has no such API key")
    return row


def revoke_api_key(transaction: Transaction, tenant: str, key_id: str, *, now_us: int) -> ApiKeyRow:
    """Revokes a key unless it is revoked, and returns it. Raises LoraportError (KEY_NOT_FOUND)."""
    row = require_api_key(transaction.connection, tenant, key_id)
    if row.revoke_us is not None:
        return row
    of_key = api_keys.c.key_id == key_id
    change = update(api_keys).where(of_key).values(revoke_us=now_us, epoch=transaction.epoch()).returning(api_keys)
    changed = build_optional(ApiKeyRow, transaction.connection.execute(change).first())
    assert changed is not None
    _log_key(transaction, Kind.API_KEY_REVOKED, changed, now_us=now_us)
    return changed


def replace_api_key(transaction: Transaction, old: ApiKeyRow, new: ApiKeyRow, *, ends_us: int) -> ApiKeyRow:
    """Adds `new` and lets `old` end, at `ends_us` if not before; returns the old key as it is then."""
    add_api_key(transaction, new)
    ends_us = ends_us if old.expire_us is None else min(ends_us, old.expire_us)
    of_key = api_keys.c.key_id == old.key_id
    change = update(api_keys).where(of_key).values(expire_us=ends_us, epoch=transaction.epoch()).returning(api_keys)
    changed = build_optional(ApiKeyRow, transaction.connection.execute(change).first())
    assert changed is not None
    return changed


def add_signer(transaction: Transaction, row: SignerRow) -> None:
    """Adds a signer; the caller has checked the tenant.

    A revoked signer's id and key stay taken, so that revoking a key cannot be undone by adding it again.

    Raises:
        LoraportError: SIGNER_EXISTS, the id or the key is in use by this tenant.
    """
    taken = select(signers.c.signer).where(
        signers.c.tenant == row.tenant, or_(signers.c.signer == row.signer, signers.c.key_id == row.key_id)
    )
    other = transaction.connection.execute(taken).scalar()
    if other is not None:
        what = "id" if other == row.signer else "key"
        raise LoraportError("SIGNER_EXISTS", f"the {what} is in use by tenants/{row.tenant}/signers/{other}")
    values = {column.name: getattr(row, column.name) for column in signers.columns}
    transaction.connection.execute(insert(signers).values(values))
    _log_signer(transaction, Kind.SIGNER_CREATED, row, now_us=row.create_us)


def list_signers(connection: Connection, tenant: str, *, after: Key | None, limit: int) -> list[SignerRow]:
    """Returns a page of a tenant's signers, oldest first, and one more."""
    statement = select(signers).where(signers.c.tenant == tenant)
    key = (signers.c.create_us, signers.c.signer)
    return build_all(SignerRow, connection.execute(page(statement, key, after=after, limit=limit)))


def active_signers(connection: Connection, tenant: str) -> Mapping[str, bytes]:
    """Returns key id → PEM of the signers whose manifests are accepted."""
    found = connection.execute(_ACTIVE_SIGNERS, {"tenant": tenant})
    return {key: pem.encode("ascii") for key, pem in found}


def revoke_signer(
    transaction: Transaction, tenant: str, signer: str, *, since: int | None, now_us: int
) -> tuple[SignerRow, bool]:
    """Revokes a signer, with `since` also for what it announced from that leaf on; returns it and if that is news.

    Raises:
        LoraportError: SIGNER_NOT_FOUND.
    """
    of_signer = (signers.c.tenant == tenant) & (signers.c.signer == signer)
    row = build_optional(SignerRow, transaction.connection.execute(select(signers).where(of_signer)).first())
    if row is None:
        raise LoraportError("SIGNER_NOT_FOUND", f"tenants/{tenant} has no signer {signer}")
    worse = since is not None and (row.since_log_index is None or since < row.since_log_index)
    if row.revoke_us is not None and not worse:
        return row, False
    values = {"revoke_us": row.revoke_us or now_us, "since_log_index": since if worse else row.since_log_index}
    change = update(signers).where(of_signer).values(values).returning(signers)
    changed = build_optional(SignerRow, transaction.connection.execute(change).first())
    assert changed is not None
    _log_signer(transaction, Kind.SIGNER_REVOKED, changed, now_us=now_us)
    return changed, True


def _log_key(transaction: Transaction, kind: Kind, row: ApiKeyRow, *, now_us: int) -> None:
    # The hash of a hash: the log may be read by those who may not have the stored hash itself.
    resource, digest = f"{tenant_name(row.tenant)}/keys/{row.key_id}", sha256_digest(row.secret_hmac)
    log.append(transaction, kind, resource=resource, digest=digest, now_us=now_us)


def _log_signer(transaction: Transaction, kind: Kind, row: SignerRow, *, now_us: int) -> None:
    resource, digest = f"{tenant_name(row.tenant)}/signers/{row.signer}", f"sha256:{row.key_id}"
    log.append(transaction, kind, resource=resource, digest=digest, now_us=now_us)
