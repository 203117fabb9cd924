"""How many of a tenant's signers a manifest needs, version by version. Rows are added and never touched again."""

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, insert, select

from loraport.bundle.canonical import MAX_SAFE_INT
from loraport.bundle.digest import sha256_digest
from loraport.log.leaf import Kind
from loraport.trust.delegation import Delegation
from services.registry.records import SignerRow
from services.registry.store import log
from services.registry.store.database import Transaction
from services.registry.store.rows import build_all, build_optional
from services.registry.store.tables import delegations, signers
from services.shared.names import tenant_name

# Built once: every announcement asks.
_NEWEST = (
    select(delegations)
    .where(delegations.c.tenant == bindparam("tenant"), delegations.c.log_index < bindparam("before"))
    .order_by(delegations.c.version.desc())
    .limit(1)
)


class DelegationRow(NamedTuple):
    """One version: its threshold, the registry's envelope, and its leaf."""

    tenant: str
    version: int
    threshold: int
    envelope: bytes
    log_index: int

    @property
    def name(self) -> str:
        return f"{tenant_name(self.tenant)}/delegations/{self.version}"


def newest(connection: Connection, tenant: str, *, before: int | None = None) -> DelegationRow:
    """Returns the newest version, or the one that held at leaf `before`.

    Before the first one, that is version 0 with a threshold of 1.
    """
    row = connection.execute(_NEWEST, {"tenant": tenant, "before": MAX_SAFE_INT if before is None else before}).first()
    none = DelegationRow(tenant=tenant, version=0, threshold=1, envelope=b"", log_index=0)
    return build_optional(DelegationRow, row) or none


def all_signers(connection: Connection, tenant: str) -> list[SignerRow]:
    """Returns every signer of a tenant, revoked or not, by name."""
    statement = select(signers).where(signers.c.tenant == tenant).order_by(signers.c.signer)
    return build_all(SignerRow, connection.execute(statement))


def keys_at(connection: Connection, tenant: str) -> list[tuple[SignerRow, bytes]]:
    """Returns every signer with its PEM."""
    return [(row, row.public_key_pem.encode("ascii")) for row in all_signers(connection, tenant)]


def counting(rows: list[tuple[SignerRow, bytes]], index: int) -> Mapping[str, bytes]:
    """Returns the keys whose announcements at leaf `index` count."""
    return {row.key_id: pem for row, pem in rows if row.since_log_index is None or index < row.since_log_index}


def add(transaction: Transaction, statement: Delegation, envelope: bytes, *, now_us: int) -> DelegationRow:
    """Adds a version and its leaf."""
    name = f"{tenant_name(statement.tenant)}/delegations/{statement.version}"
    index = log.append(transaction, Kind.DELEGATED, resource=name, digest=sha256_digest(envelope), now_us=now_us)
    row = DelegationRow(
        tenant=statement.tenant,
        version=statement.version,
        threshold=statement.threshold,
        envelope=envelope,
        log_index=index,
    )
    values = {column.name: getattr(row, column.name) for column in delegations.columns}
    transaction.connection.execute(insert(delegations).values(values))
    return row
