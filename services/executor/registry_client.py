"""The port to the registry: its catalog, followed, and the records in it, whose signatures and place in the log are
checked here.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import structlog

from services.executor.ports import Standing
from services.shared.catalog import RevisionItem, verified_record
from services.shared.catalog_client import CatalogClient
from services.shared.checkpoint import CheckpointKeeper, Seen
from services.shared.checks import Check, catalog_synced, checkpoint
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.inclusion import LogClient, RecordProofs
from services.shared.statements import StatementError, TrustedKeys

log = structlog.get_logger()


class RegistryClient:
    """The port `Registry` over one channel, which it closes together with the keeper of checkpoints."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        keeper: CheckpointKeeper,
        *,
        trusted: TrustedKeys,
        on_gone: Callable[[list[RevisionItem]], None],
        on_root: Callable[[int, bytes], object],
    ) -> None:
        self._channel = channel
        self._keeper = keeper
        self._proofs = RecordProofs(LogClient(channel), keeper)
        self._trusted = trusted
        self._catalog = CatalogClient(
            channel,
            artefacts_only=True,
            on_gone=self._gone,
            on_checkpoint=keeper.offer,
            on_root=on_root,
            floor=lambda: keeper.floor,
        )
        self._on_gone = on_gone
        # An item is replaced, never changed, so what was checked for this very item holds for it.
        self._checked: dict[str, tuple[RevisionItem, Standing]] = {}

    def start(self) -> None:
        """Begins to follow the catalog, in the running event loop."""
        self._catalog.start()

    async def failed(self) -> None:
        """Returns when the catalog is no longer followed, which only a bug can do."""
        await self._catalog.failed()

    def needed(self) -> tuple[str, ...]:
        return tuple(
            name
            for _, item in sorted(self._catalog.view.rollouts.items())
            for name in (item.from_revision_id, item.to_revision_id)
        )

    async def changed(self, timeout_s: float) -> None:
        await self._catalog.changed(timeout_s)

    async def require_fresh(self) -> None:
        await self._keeper.require_fresh(lambda: self._catalog.view)

    def seen(self) -> Seen | None:
        return self._keeper.seen

    @property
    def epoch(self) -> int:
        """The newest epoch of the catalog that has come."""
        return self._catalog.view.epoch

    def checks(self, clock: Clock) -> dict[str, Check]:
        """Checks for `loraport doctor`."""
        return {"catalog": catalog_synced(self._catalog), "checkpoint": checkpoint(self._keeper, clock)}

    async def standing(self, revision_id: str, tenant: str = "") -> Standing:
        self._keeper.require_alive()
        item = self._catalog.view.revisions.get(revision_id)
        if item is None or item.state != "ACTIVE" or tenant not in ("", item.tenant, *item.shared_tenants):
            fresh = await self._catalog.catch_up() and await self._catalog.wait_synced()
            if not fresh:
                raise LoraportError("REGISTRY_UNAVAILABLE", retry_after_s=1.0)
            item = self._catalog.view.revisions.get(revision_id)
        if item is None or item.state != "ACTIVE":
            raise LoraportError("REVISION_NOT_ACTIVE")
        known = self._checked.get(revision_id)
        if known is None or known[0] is not item:
            standing, checked = self._check(item), self._checked
            await self._proofs.require_logged(item)
            if not self._active(revision_id):  # revoked while it was being proven
                raise LoraportError("REVISION_NOT_ACTIVE")
            if checked is not self._checked:  # checked by a root that is no more
                return await self.standing(revision_id, tenant)
            known = self._checked[revision_id] = (item, standing)
        return known[1]

    def _active(self, revision_id: str) -> bool:
        item = self._catalog.view.revisions.get(revision_id)
        return item is not None and item.state == "ACTIVE"

    def _check(self, item: RevisionItem) -> Standing:
        try:
            record = verified_record(item, self._trusted)
        except StatementError as error:
            log.error("a record of the catalog proves nothing", revision_id=item.revision_id, why=str(error))
            raise LoraportError("REVISION_NOT_ACTIVE", "the revision has no valid record") from None
        return Standing(record, item.shared_tenants, item.max_rank)

    def forget(self) -> None:
        """Drops what was checked by another trust root; it is checked again when it is asked for."""
        self._checked = {}

    def _gone(self, items: list[RevisionItem]) -> None:
        for item in items:
            self._checked.pop(item.revision_id, None)
        self._on_gone(items)

    async def close(self) -> None:
        """Stops following and closes the channel."""
        await self._catalog.stop()
        await self._keeper.close()
        await self._channel.close()
