"""The block table of each request: blocks taken, shared, named and given back. Pure.

A request's leading full blocks have names (services.shared.prefix_hash); a block is offered to others under its name
once its tokens are computed, and a request that starts finds the longest known prefix of its own names.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.executor.kv_blocks import BlockPool
from services.executor.request import Request
from services.shared.prefix_hash import block_hash, prefix_root


class BlockTables:
    """Writes `blocks`, `chain`, `published` and, when blocks go, `computed` of requests."""

    def __init__(self, pool: BlockPool, *, base_digest: str) -> None:
        self.pool = pool
        self._base_digest = base_digest

    def lack(self, request: Request, end: int) -> int:
        """Return how many more blocks the request needs to hold positions [0, end)."""
        return max(0, self.pool.blocks_for(end) - len(request.blocks))

    def owed(self, running: Iterable[Request]) -> int:
        """Return the blocks that running requests still need for tokens they already know, at least one each."""
        return sum(max(1, self.lack(request, request.length)) for request in running)

    def coming(self, running: Iterable[Request]) -> set[bytes]:
        """Return the names of the blocks that requests in prefill are computing and have not offered yet."""
        found: set[bytes] = set()
        for request in running:
            if request.pending > 1:
                full = request.length // self.pool.block_size
                self._name(request, full)
                found.update(request.chain[request.published : full])
        return found

    def awaits(self, request: Request, coming: set[bytes]) -> bool:
        """Say whether blocks that the request could share are `coming`: computing them again would be waste."""
        if not coming:
            return False
        count = request.skippable // self.pool.block_size
        self._name(request, count)
        return not coming.isdisjoint(request.chain[:count])

    def share(self, request: Request) -> int:
        """Start an empty table with the cached blocks of the request's prefix; returns the tokens that they hold.

        At least one token stays to be computed.
        """
        count = request.skippable // self.pool.block_size
        self._name(request, count)
        request.blocks = self.pool.match(request.chain[:count])
        self.pool.acquire(request.blocks)
        request.published = len(request.blocks)
        request.computed = request.published * self.pool.block_size
        return request.computed

    def extend(self, request: Request, end: int) -> list[int]:
        """Add fresh blocks until the table holds positions [0, end); returns them. There must be enough."""
        fresh = self.pool.allocate(self.lack(request, end))
        assert fresh is not None
        request.blocks.extend(fresh)
        return fresh

    def publish(self, request: Request) -> None:
        """Offer the full blocks that are computed by now."""
        full = request.computed // self.pool.block_size
        self._name(request, full)
        for index in range(request.published, full):
            self.pool.publish(request.blocks[index], request.chain[index], owner=request.spec.revision_id)
        request.published = full

    def distrust(self, request: Request) -> None:
        """Take back the names of the request's blocks: their contents may be wrong."""
        self.pool.discard(request.blocks)

    def drop(self, request: Request) -> None:
        """Give all blocks back; nothing of the request is computed any more."""
        self.pool.release(request.blocks)
        request.blocks = []
        request.published = 0
        request.computed = 0

    def _name(self, request: Request, count: int) -> None:
        """Extend the request's chain to `count` names."""
        size = self.pool.block_size
        while len(request.chain) < count:
            start = len(request.chain) * size
            parent = request.chain[-1] if request.chain else self._root(request)
            request.chain.append(block_hash(parent, request.tokens(start, start + size)))

    def _root(self, request: Request) -> bytes:
        spec = request.spec
        return prefix_root(base_digest=self._base_digest, revision_id=spec.revision_id, salt=spec.salt)
