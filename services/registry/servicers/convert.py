"""From the registry's values to messages."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import audit_service_pb2 as audit_pb
from loraport.registry.v1 import base_model_service_pb2 as base_pb
from loraport.registry.v1 import catalog_service_pb2 as catalog_pb
from loraport.registry.v1 import key_service_pb2 as key_pb
from loraport.registry.v1 import tenant_service_pb2 as tenant_pb
from loraport.types.v1.types_pb2 import Violation
from services.registry.records import (
    AdapterRow,
    AliasRow,
    ApiKeyRow,
    AuditRow,
    BaseRow,
    Findings,
    RevisionRow,
    SignerRow,
    TenantRow,
)
from services.registry.servicers.rollout_item import catalog_rollout
from services.registry.store.delegations import DelegationRow
from services.shared.catalog import (
    AliasItem,
    BaseItem,
    Item,
    KeyItem,
    RestrictionItem,
    RevisionItem,
    RolloutItem,
    RootItem,
    TenantItem,
)
from services.shared.names import alias_name, base_model_name, tenant_name
from services.shared.quotas import NO_QUOTA, Quota


def timestamp(us: int) -> Timestamp:
    """Returns microseconds since the Unix epoch as a message."""
    return Timestamp(**_parts(us))


def _parts(us: int) -> dict[str, int]:
    """As `timestamp`, for a field of a message that is being made: no message is made to be copied."""
    seconds, rest = divmod(us, 1_000_000)
    return {"seconds": seconds, "nanos": rest * 1000}


def optional_timestamp(us: int | None) -> Timestamp | None:
    """As `timestamp`; None stays unset."""
    return None if us is None else timestamp(us)


def tenant(row: TenantRow) -> tenant_pb.Tenant:
    """Returns the message of a tenant."""
    return tenant_pb.Tenant(
        name=tenant_name(row.tenant),
        display_name=row.display_name,
        weight=row.weight,
        base_allowed=row.base_allowed,
        create_time=timestamp(row.create_us),
        quota=quota(row.quota),
    )


def quota(limits: Quota) -> tenant_pb.TenantQuota | None:
    """Returns the message of quotas; None when there are none."""
    return tenant_pb.TenantQuota(**limits.given()) if limits != NO_QUOTA else None


def api_key(row: ApiKeyRow) -> key_pb.ApiKey:
    """Returns the message of an API key, which never holds its secret."""
    return key_pb.ApiKey(
        name=f"{tenant_name(row.tenant)}/keys/{row.key_id}",
        scopes=row.scopes,
        create_time=timestamp(row.create_us),
        expire_time=optional_timestamp(row.expire_us),
        revoke_time=optional_timestamp(row.revoke_us),
    )


def signer(row: SignerRow) -> key_pb.Signer:
    """Returns the message of a signer."""
    return key_pb.Signer(
        name=f"{tenant_name(row.tenant)}/signers/{row.signer}",
        public_key_pem=row.public_key_pem,
        key_id=row.key_id,
        create_time=timestamp(row.create_us),
        revoke_time=optional_timestamp(row.revoke_us),
        since_log_index=row.since_log_index,
    )


def delegation(row: DelegationRow) -> key_pb.Delegation:
    """Returns the message of a tenant's delegation."""
    return key_pb.Delegation(
        name=row.name,
        version=row.version,
        threshold=row.threshold,
        envelope=row.envelope,
        log_index=row.log_index,
    )


def base_model(row: BaseRow) -> base_pb.BaseModel:
    """Returns the message of a base model."""
    return base_pb.BaseModel(
        name=base_model_name(row.base_model),
        base_id=row.base_id,
        spec_json=row.spec_json,
        create_time=timestamp(row.create_us),
    )


def revision(row: RevisionRow, *, manifest_envelope: bytes = b"", record: bool = True) -> adapter_pb.Revision:
    """Returns the message of a revision; `record` says whether the registry's envelope goes with it."""
    return adapter_pb.Revision(
        name=row.name,
        revision_id=row.revision_id,
        version=row.version,
        state=f"STATE_{row.state}",
        reasons=violations(row.reasons),
        warnings=violations(row.warnings),
        base_model=base_model_name(row.base_model),
        weights_digest=row.weights_digest,
        size_bytes=row.size_bytes,
        max_rank=row.max_rank,
        module_count=row.module_count,
        manifest_envelope=manifest_envelope,
        record_envelope=row.record_envelope if record else b"",
        etag=row.etag,
        create_time=timestamp(row.create_us),
        update_time=timestamp(row.update_us),
    )


def violations(findings: Findings) -> list[Violation]:
    """Returns the messages of reasons or warnings."""
    return [Violation(code=code, detail=detail, subject=subject) for code, detail, subject in findings]


def alias(row: AliasRow) -> adapter_pb.Alias:
    """Returns the message of an alias."""
    return adapter_pb.Alias(**_alias(row, row.name))


def _alias(row: AliasRow, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "revision_id": row.revision_id,
        "version": row.version,
        "etag": row.etag,
        "update_time": _parts(row.update_us),
    }


def adapter(row: AdapterRow, aliases: Sequence[AliasRow]) -> adapter_pb.Adapter:
    """Returns the message of an adapter."""
    return adapter_pb.Adapter(**adapter_fields(row, aliases))


def adapter_fields(row: AdapterRow, aliases: Sequence[AliasRow]) -> dict[str, Any]:
    """As `adapter`, for a message that lists hundreds: what is made in its place is not copied there."""
    name = str(row.name)
    fields = {
        "name": name,
        "base_model": base_model_name(row.base_model),
        "latest_version": row.latest_version,
        "create_time": _parts(row.create_us),
    }
    # Setting an empty list would take longer than all of the above.
    if aliases:
        fields["aliases"] = [_alias(alias, alias_name(name, alias.alias)) for alias in aliases]
    if row.shared_tenants:
        fields["shared_tenants"] = list(map(tenant_name, row.shared_tenants))
    return fields


def audit_event(row: AuditRow) -> audit_pb.AuditEvent:
    """Returns the message of an audit event."""
    return audit_pb.AuditEvent(
        sequence=row.sequence,
        event_time=timestamp(row.event_us),
        principal=row.principal,
        method=row.method,
        resource=row.resource,
        decision=row.decision,
        reason=row.reason,
        request_id=row.request_id,
        hash=row.hash,
    )


def catalog_item(item: Item) -> catalog_pb.CatalogItem:
    """Returns the message of a part of the catalog; `services.shared.catalog_client.from_proto` reads it back."""
    match item:
        case TenantItem():
            return catalog_pb.CatalogItem(
                tenant=catalog_pb.CatalogTenant(
                    tenant=item.tenant,
                    weight=item.weight,
                    base_allowed=item.base_allowed,
                    quota=quota(item.quota),
                )
            )
        case KeyItem():
            return catalog_pb.CatalogItem(key=_catalog_key(item))
        case BaseItem():
            return catalog_pb.CatalogItem(
                base_model=catalog_pb.CatalogBaseModel(base_model=item.base_model, base_id=item.base_id)
            )
        case RootItem():
            return catalog_pb.CatalogItem(
                trust_root=catalog_pb.CatalogTrustRoot(version=item.version, envelope=item.envelope)
            )
        case RestrictionItem():
            return catalog_pb.CatalogItem(
                restriction=catalog_pb.CatalogRestriction(position=item.position, body=item.body)
            )
        case RevisionItem():
            return catalog_pb.CatalogItem(revision=_catalog_revision(item))
        case AliasItem():
            return catalog_pb.CatalogItem(
                alias=catalog_pb.CatalogAlias(
                    tenant=item.tenant, adapter=item.adapter, alias=item.alias, revision_id=item.revision_id
                )
            )
        case RolloutItem():
            return catalog_pb.CatalogItem(rollout=catalog_rollout(item))


def _catalog_key(item: KeyItem) -> catalog_pb.CatalogKey:
    return catalog_pb.CatalogKey(
        key_id=item.key_id,
        tenant=item.tenant,
        secret_hmac=item.secret_hmac,
        scopes=sorted(item.scopes),
        expire_time=None if item.expires is None else timestamp(round(item.expires * 1_000_000)),
        revoked=item.revoked,
    )


def _catalog_revision(item: RevisionItem) -> catalog_pb.CatalogRevision:
    return catalog_pb.CatalogRevision(
        revision_id=item.revision_id,
        tenant=item.tenant,
        adapter=item.adapter,
        version=item.version,
        state=f"STATE_{item.state}",
        base_model=item.base_model,
        weights_digest=item.weights_digest,
        size_bytes=item.size_bytes,
        max_rank=item.max_rank,
        record_envelope=item.record_envelope,
        record_leaf=item.record_leaf,
        shared_tenants=sorted(item.shared_tenants),
    )
