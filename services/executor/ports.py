"""The outside world of an executor, as small protocols. Only `LoraportError` crosses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.shared.checkpoint import Seen
from services.shared.statements import Record


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a load that has ended; `name` is a word of LoadStage, without its prefix.

    `tier` is where a FETCH took the bytes from, STORE or DISK; empty for other stages.
    """

    name: str
    elapsed_ms: float
    size_bytes: int = 0
    tier: str = ""


def _nothing() -> None:
    """Nothing is held."""


@dataclass(frozen=True, slots=True)
class HostBytes:
    """A weights file from the loader, and the manifest that says what it means. Nothing of it is verified yet.

    `data` may be the loader's own sealed memory: call `give_back` once nothing looks at it any more.
    """

    data: memoryview
    manifest_envelope: bytes
    give_back: Callable[[], None] = _nothing


class Loader(Protocol):
    """The loader of this node."""

    async def fetch(self, revision_id: str, *, size_bytes: int, on_stage: Callable[[Stage], None]) -> HostBytes:
        """Return the sealed bytes of a revision, `size_bytes` of them; `on_stage` hears of the loader's stages.

        Raises:
            LoraportError: the loader's own reason, LOADER_UNAVAILABLE, or DIGEST_MISMATCH for another size.
        """


@dataclass(frozen=True, slots=True)
class Standing:
    """What the registry says of an ACTIVE revision: its signed record, the tenants that it is shared with, and, as a
    hint, its highest rank."""

    record: Record
    shared_tenants: frozenset[str]
    max_rank: int = 0

    def serves(self, tenant: str) -> bool:
        return tenant == self.record.tenant or tenant in self.shared_tenants


class Registry(Protocol):
    """What this executor knows of revisions."""

    async def standing(self, revision_id: str, tenant: str = "") -> Standing:
        """Return the standing of an ACTIVE revision, as new as it must be to say whether it serves `tenant`.

        Raises:
            LoraportError: REVISION_NOT_ACTIVE; RECORD_NOT_LOGGED; REGISTRY_UNAVAILABLE when it is not known here, or
                not proven yet, and cannot be asked; CHECKPOINT_STALE when the registry's checkpoint is so old that
                nothing may serve any more, or none that could prove the record is believed.
        """

    def needed(self) -> tuple[str, ...]:
        """Return the revisions that running rollouts need on their devices: for each the old one, then the new one."""

    async def changed(self, timeout_s: float) -> None:
        """Return when any of this may have changed, or after `timeout_s`."""

    def seen(self) -> Seen | None:
        """Return the newest checkpoint that is believed, for whoever compares what peers were told."""

    async def require_fresh(self) -> None:
        """Return when something new may be loaded.

        Raises:
            LoraportError: CHECKPOINT_STALE, CHECKPOINT_ROLLBACK or LOG_SPLIT_VIEW.
        """
