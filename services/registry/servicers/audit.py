"""AuditService."""

from typing import Any

from loraport.registry.v1 import audit_service_pb2 as pb
from loraport.registry.v1 import audit_service_pb2_grpc as stubs
from services.registry.desk import Desk, page_of
from services.registry.servicers import convert
from services.registry.store import journal
from services.shared.names import parse_tenant
from services.shared.paging import PageTokens, page_size


class AuditServicer(stubs.AuditServiceServicer):
    """Shows who did what."""

    def __init__(self, desk: Desk, tokens: PageTokens) -> None:
        self._desk = desk
        self._tokens = tokens

    async def ListAuditEvents(self, request: pb.ListAuditEventsRequest, context: Any) -> pb.ListAuditEventsResponse:
        tenant = parse_tenant(request.tenant, "tenant") if request.tenant else ""
        limit = page_size(request.page_size)
        scope = ("audit", tenant)
        after = self._tokens.open(request.page_token, scope=scope, kinds=(int,))
        rows = await self._desk.read(lambda view: journal.list_events(view, tenant, after=after, limit=limit))
        rows, token = page_of(rows, limit, lambda row: self._tokens.seal((row.sequence,), scope=scope))
        return pb.ListAuditEventsResponse(events=map(convert.audit_event, rows), next_page_token=token)
