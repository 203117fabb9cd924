"""Keeps a `CatalogView` as new as the registry: watch, apply, reconnect."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import structlog

from loraport.log.checkpoint import Floor
from loraport.log.restrictions import Restrictions
from loraport.registry.v1 import catalog_service_pb2 as pb
from loraport.registry.v1 import catalog_service_pb2_grpc as stubs
from loraport.registry.v1.adapter_service_pb2 import Revision
from loraport.registry.v1.rollout_service_pb2 import Rollout, RolloutPrompt
from loraport.registry.v1.tenant_service_pb2 import TenantQuota
from services.shared.catalog import (
    AliasItem,
    BaseItem,
    CatalogView,
    Item,
    KeyItem,
    PromptItem,
    RestrictionItem,
    RevisionItem,
    RolloutItem,
    RootItem,
    TenantItem,
)
from services.shared.futures import fault_of
from services.shared.quotas import NAMES, Quota

log = structlog.get_logger()

RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)
# How long whoever misses something waits for the registry. It seldom takes 5 ms; at 0.2 s on a machine at its limit an
# adapter that had just been registered was not found.
CATCH_UP_S = 2.0


def quota_from_proto(message: TenantQuota) -> Quota:
    """Returns the quotas of a message."""
    return Quota(**{name: getattr(message, name) for name in NAMES if message.HasField(name)})


def from_proto(item: pb.CatalogItem) -> Item | None:
    """Returns the plain value of an item, None for a kind that this release does not know."""
    match item.WhichOneof("item"):
        case "tenant":
            tenant = item.tenant
            return TenantItem(tenant.tenant, tenant.weight, tenant.base_allowed, quota_from_proto(tenant.quota))
        case "key":
            key = item.key
            expires = key.expire_time.ToNanoseconds() / 1e9 if key.HasField("expire_time") else None
            return KeyItem(key.key_id, key.tenant, key.secret_hmac, frozenset(key.scopes), expires, key.revoked)
        case "base_model":
            return BaseItem(item.base_model.base_model, item.base_model.base_id)
        case "revision":
            revision = item.revision
            return RevisionItem(
                revision_id=revision.revision_id,
                tenant=revision.tenant,
                adapter=revision.adapter,
                version=revision.version,
                state=Revision.State.Name(revision.state).removeprefix("STATE_"),
                base_model=revision.base_model,
                weights_digest=revision.weights_digest,
                size_bytes=revision.size_bytes,
                max_rank=revision.max_rank,
                record_envelope=revision.record_envelope,
                shared_tenants=frozenset(revision.shared_tenants),
                record_leaf=revision.record_leaf,
            )
        case "alias":
            alias = item.alias
            return AliasItem(alias.tenant, alias.adapter, alias.alias, alias.revision_id)
        case "trust_root":
            return RootItem(item.trust_root.version, item.trust_root.envelope)
        case "restriction":
            return RestrictionItem(item.restriction.position, item.restriction.body)
        case "rollout":
            return _rollout(item.rollout)
        case _:
            return None


def _rollout(message: pb.CatalogRollout) -> RolloutItem:
    return RolloutItem(
        name=message.name,
        tenant=message.tenant,
        adapter=message.adapter,
        alias=message.alias,
        salt=message.salt,
        from_revision_id=message.from_revision_id,
        to_revision_id=message.to_revision_id,
        base_model=message.base_model,
        state=Rollout.State.Name(message.state).removeprefix("STATE_"),
        share_basis_points=message.share_basis_points,
        step_index=message.step_index,
        shadow_basis_points=message.shadow_basis_points,
        generation=message.generation,
        ended=message.ended,
        golden_prompts=tuple(map(_prompt, message.golden_prompts)),
        eval_prompts=tuple(map(_prompt, message.eval_prompts)),
    )


def _prompt(message: RolloutPrompt) -> PromptItem:
    return PromptItem(message.text, tuple(message.token_ids.ids))


class CatalogClient:
    """Follows the registry until stopped.

    `on_gone` hears of revisions that may serve no longer, `on_checkpoint` of signed checkpoints, each when the view has
    reached its catalog epoch, with the restrictions that came before it. `on_root` hears of trust roots, before
    anything that came with or after them is used.

    A new connection may not lead back: behind what was signed where `floor` says what that is, so that an epoch which
    nobody signed cannot shut out the true ones for ever; else behind what was told.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        artefacts_only: bool,
        on_gone: Callable[[list[RevisionItem]], None] = lambda items: None,
        on_checkpoint: Callable[[bytes, Restrictions], None] = lambda envelope, restrictions: None,
        on_root: Callable[[int, bytes], object] = lambda version, envelope: None,
        floor: Callable[[], Floor] | None = None,
    ) -> None:
        self.view = CatalogView()
        self._stub = stubs.CatalogServiceStub(channel)
        self._artefacts_only = artefacts_only
        self._on_gone = on_gone
        self._on_checkpoint = on_checkpoint
        self._on_root = on_root
        self._floor = floor
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None

    def start(self) -> None:
        """Begins to follow, in the running event loop."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stops following; the view stays as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def failed(self) -> None:
        """Returns when following has ended by a fault, which is logged; a broken connection is none."""
        if self._task is None:
            raise RuntimeError("not started")
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            log.error("catalog is no longer followed", exc_info=self._task.exception())

    async def wait_synced(self, timeout_s: float = CATCH_UP_S) -> bool:
        """Waits until the view was complete once; False when that took too long."""
        return await self._wait(lambda: self.view.synced, timeout_s)

    async def changed(self, timeout_s: float) -> None:
        """Returns with the next part of the catalog that is taken, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait()

    async def catch_up(self, timeout_s: float = CATCH_UP_S) -> bool:
        """Makes the view at least as new as the registry is now; False when the registry did not answer in time.

        Callers share a question that has not been sent yet, so a flood of misses is not a flood of calls; a question
        already under way may be answered by an older state and is not joined.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._ask_epoch(self._asking, timeout_s))
            self._next.add_done_callback(fault_of)  # whoever waited for it has it, or has left
        question = self._next
        try:
            async with asyncio.timeout(timeout_s):
                epoch = await asyncio.shield(question)
        except (grpc.RpcError, TimeoutError):
            return False
        return await self._wait(lambda: self.view.epoch >= epoch, timeout_s)

    async def _ask_epoch(self, under_way: asyncio.Task[int] | None, timeout_s: float) -> int:
        """Asks once the question under way is answered: at most one is on the wire."""
        if under_way is not None:
            await asyncio.wait({under_way})
        self._asking, self._next = self._next, None
        answer = await self._stub.GetEpoch(pb.GetEpochRequest(), timeout=timeout_s)
        return int(answer.epoch)

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def _follow(self) -> None:
        attempt = 0
        while True:
            try:
                await self._watch_once()
                attempt = 0
            except grpc.RpcError as error:
                log.warning("catalog watch broke", code=error.code().name)  # type: ignore[attr-defined]
            except ValueError as error:
                log.error("catalog refused", why=str(error))
            await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
            attempt += 1

    async def _watch_once(self) -> None:
        """One connection: collect the full state beside the old view, swap it in whole, then apply changes."""
        incoming: CatalogView | None = CatalogView()
        async for part in self._stub.Watch(pb.WatchRequest(artefacts_only=self._artefacts_only)):
            items = [item for item in map(from_proto, part.items) if item is not None]
            for item in items:
                if isinstance(item, RootItem):
                    self._on_root(item.version, item.envelope)
            if incoming is not None:
                incoming.apply(items, epoch=part.epoch, synced=part.synced)
                gone = self._take_over(incoming) if part.synced else []
                incoming = None if part.synced else incoming
            else:
                gone = self.view.apply(items, epoch=part.epoch, synced=part.synced)
            self._alarm()
            if gone:
                self._on_gone(gone)
            if part.checkpoint and incoming is None:
                self._on_checkpoint(part.checkpoint, self.view.restraint.restrictions)
            async with self._changed:
                self._changed.notify_all()

    def _take_over(self, incoming: CatalogView) -> list[RevisionItem]:
        """Puts a complete state in the place of the view. Raises ValueError when that would lead back."""
        if self._floor is None:
            return self.view.replace(incoming)
        floor = self._floor()
        signed = floor.restriction_count, floor.restriction_head
        mine, theirs = self.view.restraint.restrictions, incoming.restraint.restrictions
        if mine.begins_with(*signed) and not theirs.begins_with(*signed):
            raise ValueError(f"the catalog lacks some of the {signed[0]} restrictions that were signed")
        return self.view.replace(incoming, least=min(self.view.epoch, floor.catalog_epoch))

    def _alarm(self) -> None:
        view = self.view
        for line in view.contradictions:
            log.critical("ALARM: the catalog shows what its log does not say", what=line, count=view.contradicted)
        view.contradicted = 0
        view.contradictions.clear()
