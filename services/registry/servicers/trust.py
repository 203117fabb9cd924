"""TrustService."""

from typing import Any

from loraport.registry.v1 import trust_service_pb2 as pb
from loraport.registry.v1 import trust_service_pb2_grpc as stubs
from services.registry.desk import Desk, Note, page_of
from services.registry.roots import Roots
from services.registry.servicers import convert
from services.registry.store import roots
from services.registry.store.database import Transaction
from services.registry.store.roots import RootRow
from services.shared.paging import PageTokens, page_size
from services.shared.rpc.server import run_blocking

_SCOPE = ("trust",)
# Of up to 256 KiB each: a page must fit a message.
_MOST = 64


class TrustServicer(stubs.TrustServiceServicer):
    """Keeps the chain of trust roots."""

    def __init__(self, desk: Desk, tokens: PageTokens, chain: Roots) -> None:
        self._desk = desk
        self._tokens = tokens
        self._chain = chain

    async def SubmitTrustRoot(self, request: pb.SubmitTrustRootRequest, context: Any) -> pb.TrustRoot:
        def work(transaction: Transaction, note: Note) -> pb.TrustRoot:
            row, stopped = self._chain.submit(transaction, request.envelope, now_us=self._desk.now_us())
            note.resource, note.reason = row.name, f"{stopped} revisions stopped" if stopped else ""
            return _message(row, stopped)

        answer = await self._desk.change(request, pb.TrustRoot, work, resource="trustRoots/-")
        await run_blocking(self._chain.follow)
        return answer

    async def ListTrustRoots(self, request: pb.ListTrustRootsRequest, context: Any) -> pb.ListTrustRootsResponse:
        limit = page_size(request.page_size, most=_MOST)
        after = self._tokens.open(request.page_token, scope=_SCOPE, kinds=(int,))
        rows = await self._desk.read(lambda view: roots.list_roots(view, after=after, limit=limit))
        rows, token = page_of(rows, limit, lambda row: self._tokens.seal((row.version,), scope=_SCOPE))
        return pb.ListTrustRootsResponse(trust_roots=map(_message, rows), next_page_token=token)


def _message(row: RootRow, stopped: int = 0) -> pb.TrustRoot:
    return pb.TrustRoot(
        name=row.name,
        version=row.version,
        envelope=row.envelope,
        log_index=row.log_index,
        create_time=convert.timestamp(row.create_us),
        stopped_revision_count=stopped,
    )
