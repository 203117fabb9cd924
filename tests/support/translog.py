"""A registry's log as tests need it: grows when told, signs what it is told to sign, proves what is true."""

import time
from typing import Any

from loraport.bundle.envelope import SigningKey
from loraport.log import merkle
from loraport.log.checkpoint import Checkpoint, seal_checkpoint
from loraport.registry.v1 import log_service_pb2 as pb
from loraport.registry.v1.log_service_pb2_grpc import LogServiceServicer


class FakeLog(LogServiceServicer):
    """A log of `size` leaves; `history` makes two logs of one size differ. `proofs` counts what was asked for."""

    def __init__(self, key: SigningKey, *, size: int = 3, history: str = "") -> None:
        self.key = key
        self.revocation_epoch = 0
        self.proofs = 0
        self._history = history
        self._hashes: list[bytes] = []
        self.grow(size)

    @property
    def size(self) -> int:
        return len(self._hashes)

    def grow(self, count: int = 1) -> None:
        start = self.size
        self._hashes += [merkle.leaf_hash(f"{self._history}{i}".encode()) for i in range(start, start + count)]

    def root(self, size: int | None = None) -> bytes:
        return merkle.root(self._hashes[: self.size if size is None else size])

    def checkpoint(self, epoch: int, *, now: float | None = None, life_s: int = 600, **changes: Any) -> bytes:
        """Signs a checkpoint of now."""
        issued = int(time.time() if now is None else now)
        values: dict[str, Any] = {
            "tree_size": self.size,
            "root_hash": self.root().hex(),
            "catalog_epoch": epoch,
            "revocation_epoch": self.revocation_epoch,
            "issued": issued,
            "expires": issued + life_s,
        }
        return seal_checkpoint(Checkpoint(**(values | changes)), self.key)

    def prove(self, old: int, new: int) -> list[bytes]:
        self.proofs += 1

        def read(node: merkle.Node) -> bytes:
            level, index = node
            return merkle.root(self._hashes[index << level : (index + 1) << level])

        return merkle.prove(merkle.consistency_ranges(old, new), read)

    async def GetConsistencyProof(self, request: Any, context: Any) -> Any:
        return pb.ConsistencyProof(hashes=self.prove(request.old_tree_size, request.new_tree_size))
