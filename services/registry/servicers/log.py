"""LogService."""

from typing import Any

from loraport.registry.v1 import log_service_pb2 as pb
from loraport.registry.v1 import log_service_pb2_grpc as stubs
from services.registry.checkpoints import Checkpoints
from services.registry.desk import Desk, page_of
from services.registry.servicers import convert
from services.registry.store import log
from services.shared.errors import LoraportError
from services.shared.paging import PageTokens, page_size

_SCOPE = ("log",)


class LogServicer(stubs.LogServiceServicer):
    """Proves what the registry has ever said."""

    def __init__(self, desk: Desk, tokens: PageTokens, checkpoints: Checkpoints) -> None:
        self._desk = desk
        self._tokens = tokens
        self._checkpoints = checkpoints

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Any) -> pb.Checkpoint:
        issued = await self._checkpoints.newest()
        checkpoint = issued.checkpoint
        return pb.Checkpoint(
            envelope=issued.envelope,
            tree_size=checkpoint.tree_size,
            root_hash=bytes.fromhex(checkpoint.root_hash),
            catalog_epoch=checkpoint.catalog_epoch,
            revocation_epoch=checkpoint.revocation_epoch,
            expire_time=convert.timestamp(checkpoint.expires * 1_000_000),
        )

    async def GetInclusionProof(self, request: pb.GetInclusionProofRequest, context: Any) -> pb.InclusionProof:
        size = await self._size(request.tree_size)
        index = request.leaf_index
        (leaf, proof), body = await self._desk.read(
            lambda view: (log.inclusion_proof(view, index, size), log.leaf_body(view, index))
        )
        return pb.InclusionProof(leaf_index=index, tree_size=size, leaf_hash=leaf, hashes=proof, body=body)

    async def GetConsistencyProof(self, request: pb.GetConsistencyProofRequest, context: Any) -> pb.ConsistencyProof:
        old, new = request.old_tree_size, await self._size(request.new_tree_size)
        proof = await self._desk.read(lambda view: log.consistency_proof(view, old, new))
        return pb.ConsistencyProof(old_tree_size=old, new_tree_size=new, hashes=proof)

    async def ListLeaves(self, request: pb.ListLeavesRequest, context: Any) -> pb.ListLeavesResponse:
        limit = page_size(request.page_size)
        after = self._tokens.open(request.page_token, scope=_SCOPE, kinds=(int,))
        if request.start_index < 0:
            raise LoraportError("INVALID_REQUEST", "start_index must not be negative", subject="start_index")
        start = request.start_index if after is None else int(after[0]) + 1
        rows = await self._desk.read(lambda view: log.list_leaves(view, start=start, limit=limit))
        rows, token = page_of(rows, limit, lambda row: self._tokens.seal((row[0],), scope=_SCOPE))
        leaves = [pb.Leaf(index=index, body=body) for index, body in rows]
        return pb.ListLeavesResponse(leaves=leaves, next_page_token=token)

    async def _size(self, requested: int) -> int:
        """Returns the size that was asked for, of the newest checkpoint for 0."""
        return requested or (await self._checkpoints.newest()).checkpoint.tree_size
