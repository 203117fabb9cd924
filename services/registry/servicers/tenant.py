"""TenantService."""

from typing import Any

from loraport.registry.v1 import tenant_service_pb2 as pb
from loraport.registry.v1 import tenant_service_pb2_grpc as stubs
from services.registry.desk import Desk, Note, page_of
from services.registry.servicers import convert
from services.registry.store import accounts
from services.registry.store.database import Transaction
from services.shared.errors import FaultList
from services.shared.names import check_id, parse_tenant, tenant_name
from services.shared.paging import PageTokens, page_size

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
            faults.raise_if_any()
            row = accounts.add_tenant(
                transaction,
                tenant,
                display_name=settings.display_name,
                weight=weight,
                base_allowed=settings.base_allowed if settings.HasField("base_allowed") else True,
                now_us=self._desk.now_us(),
            )
            return convert.tenant(row)

        return await self._desk.change(
            request, pb.Tenant, work, resource=tenant_name(request.tenant_id), request_id=request.request_id
        )

    async def GetTenant(self, request: pb.GetTenantRequest, context: Any) -> pb.Tenant:
        tenant = parse_tenant(request.name, "name")
        return convert.tenant(await self._desk.read(lambda view: accounts.require_tenant(view, tenant)))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Any) -> pb.ListTenantsResponse:
        limit = page_size(request.page_size)
        after = self._tokens.open(request.page_token, scope=_SCOPE, kinds=(str,))
        rows = await self._desk.read(lambda view: accounts.list_tenants(view, after=after, limit=limit))
        rows, token = page_of(rows, limit, lambda row: self._tokens.seal((row.tenant,), scope=_SCOPE))
        return pb.ListTenantsResponse(tenants=map(convert.tenant, rows), next_page_token=token)
