"""From a revision id to what may be loaded for it: the signed record, the manifest, digest and size.

The catalog is a hint; the record's signature and the proof that it is in the log decide. Manifests are asked for once
and kept.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from services.loader.manifests import read_manifest
from services.loader.ports import RegistryPort
from services.shared.catalog import RevisionItem, verified_record
from services.shared.errors import LoraportError
from services.shared.statements import Record, StatementError, TrustedKeys

log = structlog.get_logger()

# Each holds a manifest of at most 256 KiB.
MAX_KEPT = 256


@dataclass(frozen=True, slots=True)
class Resolved:
    """What may be loaded for a revision, and the two envelopes that prove it."""

    revision_id: str
    tenant: str
    weights_digest: str
    size_bytes: int
    manifest_envelope: bytes
    record_envelope: bytes


class Resolver:
    """Resolves each revision once at a time, whoever asks."""

    def __init__(self, registry: RegistryPort, trusted: TrustedKeys) -> None:
        self._registry = registry
        self._trusted = trusted
        self._kept: OrderedDict[str, Resolved] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Resolved]] = {}

    async def resolve(self, revision_id: str) -> Resolved:
        """Returns what may be loaded.

        Raises:
            LoraportError: REVISION_NOT_FOUND, REVISION_NOT_ACTIVE, DIGEST_MISMATCH (the stored manifest is not of
                this revision), REGISTRY_UNAVAILABLE, CHECKPOINT_STALE (for so long that nothing is handed out), or what
                RegistryPort.require_logged raises.
        """
        self._registry.require_alive()
        item = await self._registry.item(revision_id)
        if item is None:
            raise LoraportError("REVISION_NOT_FOUND", f"there is no revision {revision_id}")
        if item.state != "ACTIVE":
            raise LoraportError("REVISION_NOT_ACTIVE", f"revision {revision_id} is {item.state}")
        kept = self._kept.get(revision_id)
        if kept is not None and kept.record_envelope == item.record_envelope:
            self._kept.move_to_end(revision_id)
            return kept
        task = self._asking.get(revision_id)
        if task is None:
            task = self._asking[revision_id] = asyncio.create_task(self._ask(item))
            task.add_done_callback(lambda done: self._asked(revision_id, done))
        all_kept = self._kept
        resolved = await asyncio.shield(task)
        # What was checked by a root that is no more is checked again.
        return resolved if all_kept is self._kept else await self.resolve(revision_id)

    def forget(self, revision_ids: Iterable[str]) -> None:
        """Drops what is kept of revisions that may serve no longer."""
        for revision_id in revision_ids:
            self._kept.pop(revision_id, None)

    def forget_all(self) -> None:
        """Drops everything: what was checked by another trust root is checked again."""
        self._kept, self._asking = OrderedDict(), {}

    async def _ask(self, item: RevisionItem) -> Resolved:
        try:
            record: Record = await asyncio.to_thread(verified_record, item, self._trusted)
        except StatementError as error:
            log.error("record refused", revision_id=item.revision_id, why=str(error))
            raise LoraportError("REVISION_NOT_ACTIVE", f"revision {item.revision_id} has no valid record") from None
        _, info = await asyncio.gather(self._registry.require_logged(item), self._registry.revision(item.revision_id))
        await asyncio.to_thread(_check_manifest, info.manifest_envelope, record)
        return Resolved(
            revision_id=record.revision_id,
            tenant=record.tenant,
            weights_digest=record.weights_digest,
            size_bytes=record.weights_size,
            manifest_envelope=info.manifest_envelope,
            record_envelope=item.record_envelope,
        )

    def _asked(self, revision_id: str, done: asyncio.Task[Resolved]) -> None:
        current = self._asking.get(revision_id) is done
        if current:
            del self._asking[revision_id]
        if done.cancelled() or done.exception() is not None or not current:
            return
        self._kept[revision_id] = done.result()
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _check_manifest(envelope: bytes, record: Record) -> None:
    read_manifest(
        envelope,
        revision_id=record.revision_id,
        weights_digest=record.weights_digest,
        weights_size=record.weights_size,
    )
