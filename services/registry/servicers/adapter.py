"""AdapterService."""

from typing import Any

from sqlalchemy import Connection

from loraport.registry.v1 import adapter_service_pb2 as pb
from loraport.registry.v1 import adapter_service_pb2_grpc as stubs
from services.registry import catalog, moving
from services.registry.desk import Desk, Note, page_of
from services.registry.publishing import Publishing, find_revision
from services.registry.records import RevisionRow
from services.registry.servicers import convert
from services.registry.servicers.pointing import Pointing
from services.registry.store import accounts, adapters, revisions
from services.registry.store.database import Transaction
from services.shared.errors import LoraportError
from services.shared.names import parse_adapter, parse_alias, parse_tenant
from services.shared.paging import PageTokens, page_size

ALL_TENANTS = "tenants/-"


class AdapterServicer(stubs.AdapterServiceServicer):
    """Keeps adapters, their revisions and aliases."""

    def __init__(self, desk: Desk, tokens: PageTokens, publishing: Publishing, pointing: Pointing) -> None:
        self._desk = desk
        self._pointing = pointing
        self._tokens = tokens
        self._publishing = publishing

    async def RegisterRevision(self, request: pb.RegisterRevisionRequest, context: Any) -> pb.RegisterRevisionResponse:
        def work(transaction: Transaction, note: Note) -> pb.RegisterRevisionResponse:
            announced = self._publishing.announce(
                transaction,
                parse_tenant(request.parent),
                request.manifest_envelope,
                now_us=self._desk.now_us(),
                validate_only=request.validate_only,
            )
            note.resource = announced.revision.name
            note.reason = "validate_only" if request.validate_only else ""
            response = pb.RegisterRevisionResponse(
                revision=convert.revision(announced.revision), upload_session=announced.session
            )
            if announced.session:
                response.session_expire_time.CopyFrom(convert.timestamp(announced.expires * 1_000_000))
            return response

        return await self._desk.change(
            request,
            pb.RegisterRevisionResponse,
            work,
            resource=request.parent,
            request_id=request.request_id,
        )

    async def AdmitRevision(self, request: pb.AdmitRevisionRequest, context: Any) -> pb.Revision:
        envelope = request.verification_envelope

        def work(transaction: Transaction, note: Note) -> pb.Revision:
            verification = self._publishing.open_verification(transaction.connection, envelope)
            note.resource = verification.revision_id
            row = self._publishing.admit(transaction, verification, envelope, now_us=self._desk.now_us())
            note.resource, note.reason = row.name, row.state
            return convert.revision(row)

        return await self._desk.change(request, pb.Revision, work, resource="revisions/-")

    async def ApproveRevision(self, request: pb.ApproveRevisionRequest, context: Any) -> pb.Revision:
        def work(transaction: Transaction, note: Note) -> pb.Revision:
            row = self._revision(transaction, note, request.name)
            return convert.revision(
                self._publishing.approve(transaction, row, etag=request.etag, now_us=self._desk.now_us())
            )

        return await self._desk.change(request, pb.Revision, work, resource=request.name, request_id=request.request_id)

    async def RevokeRevision(self, request: pb.RevokeRevisionRequest, context: Any) -> pb.Revision:
        def work(transaction: Transaction, note: Note) -> pb.Revision:
            row = self._revision(transaction, note, request.name)
            return convert.revision(
                self._publishing.revoke(
                    transaction,
                    row,
                    etag=request.etag,
                    reason=request.reason,
                    security=request.security,
                    now_us=self._desk.now_us(),
                )
            )

        return await self._desk.change(
            request,
            pb.Revision,
            work,
            resource=request.name,
            reason=request.reason,
            request_id=request.request_id,
        )

    async def GetRevision(self, request: pb.GetRevisionRequest, context: Any) -> pb.Revision:
        def read(view: Connection) -> pb.Revision:
            row = find_revision(view, request.name)
            return convert.revision(row, manifest_envelope=revisions.manifest_envelope(view, row))

        return await self._desk.read(read)

    async def ListRevisions(self, request: pb.ListRevisionsRequest, context: Any) -> pb.ListRevisionsResponse:
        name, limit = parse_adapter(request.parent, "parent"), page_size(request.page_size)
        scope = ("revisions", name.tenant, name.adapter)
        after = self._tokens.open(request.page_token, scope=scope, kinds=(int,))

        def read(view: Connection) -> pb.ListRevisionsResponse:
            adapter = adapters.require_adapter(view, name)
            found = revisions.list_revisions(view, adapter.adapter_id, after=after, limit=limit)
            rows, token = page_of(found, limit, lambda row: self._tokens.seal((row.version,), scope=scope))
            shown = [convert.revision(row, record=False) for row in rows]
            return pb.ListRevisionsResponse(revisions=shown, next_page_token=token)

        return await self._desk.read(read)

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Any) -> pb.Adapter:
        name = parse_adapter(request.name)

        def read(view: Connection) -> pb.Adapter:
            row = adapters.require_adapter(view, name)
            return convert.adapter(row, adapters.aliases_of(view, row))

        return await self._desk.read(read)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        tenant = None if request.parent == ALL_TENANTS else parse_tenant(request.parent)
        limit = page_size(request.page_size)
        scope = ("adapters", tenant or "-")
        after = self._tokens.open(request.page_token, scope=scope, kinds=(str, str))

        def read(view: Connection) -> pb.ListAdaptersResponse:
            if tenant is not None:
                accounts.require_tenant(view, tenant)
            found = adapters.list_adapters(view, tenant, after=after, limit=limit)
            rows, token = page_of(
                found, limit, lambda item: self._tokens.seal((item[0].tenant, item[0].adapter), scope=scope)
            )
            # The message is made in the thread as well: other calls need not wait for hundreds of parts.
            shown = [convert.adapter_fields(row, aliases) for row, aliases in rows]
            return pb.ListAdaptersResponse(adapters=shown, next_page_token=token)

        return await self._desk.read(read)

    async def SetAlias(self, request: pb.SetAliasRequest, context: Any) -> pb.Alias:
        return await self._pointing.set_alias(request, remaining_s=context.time_remaining)

    async def DeleteAlias(self, request: pb.DeleteAliasRequest, context: Any) -> pb.Alias:
        def work(transaction: Transaction, note: Note) -> pb.Alias:
            name, alias = parse_alias(request.name)
            adapter = adapters.find_adapter(transaction.connection, name)
            row = adapters.find_alias(transaction.connection, adapter.adapter_id, alias) if adapter else None
            if row is None:
                raise LoraportError("ALIAS_NOT_FOUND", f"there is no alias {request.name[:200]}")
            # Asking again for a removal that was done is no error and changes nothing.
            if not row.removed:
                catalog.check_etag(request.etag, row.etag, row.name)
                moving.require_free(transaction, row.adapter_id, alias)
                row = adapters.remove_alias(transaction, row, now_us=self._desk.now_us())
            return convert.alias(row)

        return await self._desk.change(request, pb.Alias, work, resource=request.name, request_id=request.request_id)

    async def ShareAdapter(self, request: pb.ShareAdapterRequest, context: Any) -> pb.Adapter:
        def work(transaction: Transaction, note: Note) -> pb.Adapter:
            row = adapters.require_adapter(transaction.connection, parse_adapter(request.name))
            wanted = catalog.share(row, (parse_tenant(name, "shared_tenants") for name in request.shared_tenants))
            if wanted is not None:
                accounts.require_tenants(transaction.connection, wanted)
                row = adapters.share(transaction, row, wanted, now_us=self._desk.now_us())
                note.reason = "with " + (", ".join(wanted) or "nobody")
            return convert.adapter(row, adapters.aliases_of(transaction.connection, row))

        return await self._desk.change(request, pb.Adapter, work, resource=request.name, request_id=request.request_id)

    @staticmethod
    def _revision(transaction: Transaction, note: Note, reference: str) -> RevisionRow:
        row = find_revision(transaction.connection, reference)
        note.resource = row.name
        return row
