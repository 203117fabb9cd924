"""The loader's outside world: the object store and the registry, each as one small interface."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol

from loraport.bundle.base import BaseSpec
from services.shared.catalog import RevisionItem
from services.shared.checkpoint import Seen
from services.shared.checks import Check
from services.shared.clock import Clock

Area = Literal["quarantine", "verified"]


class ObjectStore(Protocol):
    """Two areas of objects. Blocking: call it from a thread. Nothing it returns is trusted.

    Every method raises LoraportError: STORE_UNAVAILABLE when the store does not do its work, STORAGE_FULL when it
    has no room.
    """

    def prepare(self) -> None:
        """Makes the areas if they are missing. Idempotent."""

    def put(self, area: Area, key: str, data: BinaryIO, size_bytes: int) -> None:
        """Writes an object of exactly `size_bytes`, whole or not at all; an object of that key is replaced."""

    def read(self, area: Area, key: str) -> Generator[bytes, None, None]:
        """Yields an object's stored bytes, never decoded; raises ObjectMissing. Close it when done.

        However slowly they come, it yields what is there after some seconds, or raises: who reads can leave.
        """

    def delete(self, area: Area, key: str) -> None:
        """Removes an object. Idempotent."""

    def keys(self, area: Area, prefix: str) -> list[str]:
        """Lists keys that begin with `prefix`, some thousands at most. For the sweep of quarantine only."""


class ObjectMissing(Exception):
    """The store answers, and has no such object."""


@dataclass(frozen=True, slots=True)
class RevisionInfo:
    """A revision as the registry shows it now. Reasons and warnings are rows of (code, detail, subject)."""

    revision_id: str
    state: str
    manifest_envelope: bytes
    reasons: tuple[tuple[str, str, str], ...]
    warnings: tuple[tuple[str, str, str], ...]


class RegistryPort(Protocol):
    """What the loader asks of the registry.

    Every call raises LoraportError: REGISTRY_UNAVAILABLE when there is no answer, else the registry's own reason.
    """

    def follow(self, on_gone: Callable[[list[RevisionItem]], None]) -> None:
        """Begins to follow the catalog; `on_gone` hears of revisions that may serve no longer."""

    async def failed(self) -> None:
        """Returns when the catalog is no longer followed, which only a bug can do."""

    async def item(self, revision_id: str) -> RevisionItem | None:
        """Returns a revision's catalog item, not older than this call unless it is ACTIVE; None if there is none."""

    def is_active(self, revision_id: str) -> bool:
        """Says whether a revision is ACTIVE, as far as the catalog is known."""

    def active_digest(self, digest: str) -> bool:
        """Says whether an ACTIVE revision has these weights, as far as the catalog is known."""

    def needed(self) -> frozenset[str]:
        """Returns the digests of the weights that running rollouts need, as far as the catalog is known."""

    async def require_fresh(self) -> None:
        """Returns when something new may be loaded.

        Raises LoraportError: CHECKPOINT_STALE, CHECKPOINT_ROLLBACK or LOG_SPLIT_VIEW.
        """

    def require_alive(self) -> None:
        """Raises LoraportError (CHECKPOINT_STALE) when what is loaded may not be handed out any more either."""

    def seen(self) -> Seen | None:
        """Returns the newest checkpoint that is believed, for whoever compares what peers were told."""

    @property
    def epoch(self) -> int:
        """The newest epoch of the catalog that has come."""

    def checks(self, clock: Clock) -> dict[str, Check]:
        """Checks for `loraport doctor`; once the catalog is followed."""

    async def require_logged(self, item: RevisionItem) -> None:
        """Returns when the item's record is proven to be in the log; asks once for each record.

        Raises LoraportError: RECORD_NOT_LOGGED, LOG_SPLIT_VIEW or CHECKPOINT_STALE.
        """

    async def revision(self, revision_id: str) -> RevisionInfo:
        """Returns one revision with its manifest."""

    async def base_spec(self, base_model: str) -> BaseSpec:
        """Returns the specification of a base model, by its id."""

    async def admit(self, verification_envelope: bytes) -> str:
        """Hands a verification result in; returns the revision's state after it."""

    async def close(self) -> None:
        """Stops following and closes the connection."""
