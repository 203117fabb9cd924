"""TenantService."""

from typing import Any

from sqlalchemy import Connection

from loraport.registry.v1 import tenant_service_pb2 as pb
from loraport.registry.v1 import tenant_service_pb2_grpc as stubs
from services.registry.desk import Desk, Note, page_of
from services.registry.servicers import convert
from services.registry.store import accounts
from services.registry.store.database import Transaction
from services.shared.catalog_client import quota_from_proto
from services.shared.errors import FaultList
from services.shared.names import check_id, parse_tenant, tenant_name
from services.shared.paging import PageTokens, page_size
from services.shared.quotas import MAX_LIMIT, Quota

MAX_WEIGHT = 1000.0
_SCOPE = ("tenants",)


class TenantServicer(stubs.TenantServiceServicer):
    """Keeps the tenants."""

    def __init__(self, desk: Desk, tokens: PageTokens) -> None:
        self._desk = desk
        self._tokens = tokens

    async def CreateTenant(self, request: pb.CreateTenantRequest, context: Any) -> pb.Tenant:
        def work(transaction: Transaction, note: Note) -> pb.Tenant:
            tenant = check_id(request.tenant_id, "tenant_id")
            settings = request.tenant
            faults = FaultList()
            faults.require(
                len(settings.display_name) <= 256 and settings.display_name.isprintable(),
                "tenant.display_name",
                "must be at most 256 printable characters",
            )
            # Zero is "not set"; NaN fails the comparison.
            weight = settings.weight or 1.0
            faults.require(0 < weight <= MAX_WEIGHT, "tenant.weight", f"must be in (0, {MAX_WEIGHT:g}]")
            quota = _quota(settings.quota, faults, "tenant.quota")
            faults.raise_if_any()
            row = accounts.add_tenant(
                transaction,
                tenant,
                display_name=settings.display_name,
                weight=weight,
                base_allowed=settings.base_allowed if settings.HasField("base_allowed") else True,
                quota=quota,
                now_us=self._desk.now_us(),
            )
            return convert.tenant(row)

        return await self._desk.change(
            request, pb.Tenant, work, resource=tenant_name(request.tenant_id), request_id=request.request_id
        )

    async def GetTenant(self, request: pb.GetTenantRequest, context: Any) -> pb.Tenant:
        tenant = parse_tenant(request.name, "name")

        def read(view: Connection) -> pb.Tenant:
            message = convert.tenant(accounts.require_tenant(view, tenant))
            count, size = accounts.usage(view, tenant)
            message.usage.CopyFrom(pb.TenantUsage(adapter_count=count, stored_bytes=size))
            return message

        return await self._desk.read(read)

    async def SetTenantQuota(self, request: pb.SetTenantQuotaRequest, context: Any) -> pb.Tenant:
        def work(transaction: Transaction, note: Note) -> pb.Tenant:
            faults = FaultList()
            tenant, quota = parse_tenant(request.name, "name"), _quota(request.quota, faults, "quota")
            faults.raise_if_any()
            row = accounts.set_quota(transaction, tenant, quota)
            note.reason = ", ".join(f"{name} {limit}" for name, limit in quota.given().items()) or "no quotas"
            return convert.tenant(row)

        return await self._desk.change(request, pb.Tenant, work, resource=request.name)

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Any) -> pb.ListTenantsResponse:
        limit = page_size(request.page_size)
        after = self._tokens.open(request.page_token, scope=_SCOPE, kinds=(str,))
        rows = await self._desk.read(lambda view: accounts.list_tenants(view, after=after, limit=limit))
        rows, token = page_of(rows, limit, lambda row: self._tokens.seal((row.tenant,), scope=_SCOPE))
        return pb.ListTenantsResponse(tenants=map(convert.tenant, rows), next_page_token=token)


def _quota(message: pb.TenantQuota, faults: FaultList, field: str) -> Quota:
    quota = quota_from_proto(message)
    for name, limit in quota.given().items():
        faults.require(0 <= limit <= MAX_LIMIT, f"{field}.{name}", f"must be in [0, {MAX_LIMIT}]")
    return quota
