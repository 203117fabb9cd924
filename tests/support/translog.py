"""A registry's log as tests need it: grows when told, signs what it is told to sign, proves what is true."""

import time
from collections.abc import Awaitable, Callable, Iterable
from functools import reduce
from typing import Any

from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import SigningKey
from loraport.log import merkle
from loraport.log.checkpoint import Checkpoint, seal_checkpoint
from loraport.log.leaf import FIRST, Kind, Leaf
from loraport.log.replay import NOBODY, shared_digest
from loraport.log.restrictions import Listed, Restrictions
from loraport.registry.v1 import catalog_service_pb2 as catalog
from loraport.registry.v1 import log_service_pb2 as pb
from loraport.registry.v1.log_service_pb2_grpc import LogServiceServicer
from services.shared.errors import LoraportError


class FakeLog(LogServiceServicer):
    """A log of `size` leaves; `history` makes two logs of one size differ. `proofs` and `inclusions` count.

    The next `dead` questions about records are not answered; `asked` counts those questions.
    """

    def __init__(self, key: SigningKey, *, size: int = 3, history: str = "") -> None:
        self.key = key
        self.revocation_epoch = 0
        self.proofs = 0
        self.inclusions = 0
        self.asked = 0
        self.dead = 0
        self.on_checkpoint: Callable[[], Awaitable[None]] | None = None
        self.bodies: dict[int, bytes] = {}
        self.restrictions: list[bytes] = []
        self._shares: dict[str, str] = {}
        self._history = history
        self._hashes: list[bytes] = []
        self.grow(size)

    @property
    def size(self) -> int:
        return len(self._hashes)

    def grow(self, count: int = 1) -> None:
        start = self.size
        self._hashes += [merkle.leaf_hash(f"{self._history}{i}".encode()) for i in range(start, start + count)]

    def record(self, name: str, envelope: bytes, *, kind: Kind = Kind.RECORD) -> int:
        """Appends the leaf of a record, or of what else has its name and bytes, and returns its index."""
        return self._append(kind, name, sha256_digest(envelope)).index

    def restrict(self, kind: Kind, name: str, digest: str = "sha256:" + "0" * 64) -> bytes:
        """Appends a leaf that takes something back, and returns its body."""
        body = self._append(kind, name, digest).body()
        self.restrictions.append(body)
        return body

    def share(self, name: str, tenants: Iterable[str]) -> None:
        """Appends whom an adapter is shared with, unless its newest leaf says so."""
        digest = shared_digest(tenants)
        if self._shares.get(name, NOBODY) != digest:
            self._shares[name] = digest
            self.restrict(Kind.SHARED, name, digest)

    def told(self) -> list[catalog.CatalogItem]:
        """Returns the restrictions as a catalog tells them."""
        return [
            catalog.CatalogItem(restriction=catalog.CatalogRestriction(position=position, body=body))
            for position, body in enumerate(self.restrictions)
        ]

    def as_list(self) -> Restrictions:
        """Returns the restrictions as a peer has them."""
        made = Restrictions()
        for position, body in enumerate(self.restrictions):
            made.take(position, body)
        return made

    def root(self, size: int | None = None) -> bytes:
        return merkle.root(self._hashes[: self.size if size is None else size])

    def checkpoint(self, epoch: int, *, now: float | None = None, life_s: int = 600, **changes: Any) -> bytes:
        """Signs a checkpoint of now."""
        issued = int(time.time() if now is None else now)
        listed = reduce(Listed.grown, self.restrictions, Listed())
        values: dict[str, Any] = {
            "tree_size": self.size,
            "root_hash": self.root().hex(),
            "catalog_epoch": epoch,
            "revocation_epoch": self.revocation_epoch,
            "restriction_count": listed.count,
            "restriction_head": listed.head.hex(),
            "issued": issued,
            "expires": issued + life_s,
        }
        return seal_checkpoint(Checkpoint(**(values | changes)), self.key)

    def prove(self, old: int, new: int) -> list[bytes]:
        self.proofs += 1
        return merkle.prove(merkle.consistency_ranges(old, new), self._read)

    def inclusion(self, index: int, size: int) -> tuple[bytes, list[bytes]]:
        """Returns (body, proof) of a leaf of a tree of `size` leaves."""
        self.inclusions += 1
        if not 0 <= index < size <= self.size:
            raise LoraportError("INVALID_REQUEST")
        proof = merkle.prove(merkle.inclusion_ranges(index, size), self._read)
        return self.bodies.get(index, b"{}"), proof

    def _append(self, kind: Kind, name: str, digest: str) -> Leaf:
        leaf = Leaf(index=self.size, time=1, kind=kind, resource=name, digest=digest, previous=FIRST)
        self.bodies[leaf.index] = leaf.body()
        self._hashes.append(merkle.leaf_hash(leaf.body()))
        return leaf

    def _read(self, node: merkle.Node) -> bytes:
        level, index = node
        return merkle.root(self._hashes[index << level : (index + 1) << level])

    async def _answering(self) -> None:
        self.asked += 1
        if self.dead:
            self.dead -= 1
            raise LoraportError("REGISTRY_UNAVAILABLE", retry_after_s=1.0)

    async def GetInclusionProof(self, request: Any, context: Any) -> Any:
        await self._answering()
        body, proof = self.inclusion(request.leaf_index, request.tree_size)
        return pb.InclusionProof(body=body, hashes=proof)

    async def GetCheckpoint(self, request: Any, context: Any) -> Any:
        await self._answering()
        if self.on_checkpoint is not None:
            await self.on_checkpoint()
        return pb.Checkpoint(tree_size=self.size)

    async def GetConsistencyProof(self, request: Any, context: Any) -> Any:
        return pb.ConsistencyProof(hashes=self.prove(request.old_tree_size, request.new_tree_size))
