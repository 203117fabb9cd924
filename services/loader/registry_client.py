"""The port to the registry over gRPC."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from loraport.bundle.base import BaseSpec, base_id, from_json
from loraport.bundle.canonical import StrictJsonError, load_strict
from loraport.registry.v1 import adapter_service_pb2 as adapters
from loraport.registry.v1 import base_model_service_pb2 as bases
from loraport.registry.v1.adapter_service_pb2_grpc import AdapterServiceStub
from loraport.registry.v1.base_model_service_pb2_grpc import BaseModelServiceStub
from services.loader.ports import RevisionInfo
from services.shared.catalog import RevisionItem
from services.shared.catalog_client import CatalogClient
from services.shared.checkpoint import CheckpointKeeper, Seen
from services.shared.checks import Check, catalog_synced, checkpoint
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.inclusion import LogClient, RecordProofs
from services.shared.names import base_model_name
from services.shared.rpc.asking import ask_registry

log = structlog.get_logger()

CALL_S = 10.0
# The table of a base model's modules may have tens of thousands of rows.
MAX_SPEC_BYTES = 8 << 20
MAX_SPECS = 64


class RegistryClient:
    """The port `RegistryPort` over one channel, which it closes together with the keeper of checkpoints."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        keeper: CheckpointKeeper,
        *,
        on_root: Callable[[int, bytes], object] = lambda version, envelope: None,
    ) -> None:
        self._channel = channel
        self._keeper = keeper
        self._on_root = on_root
        self._proofs = RecordProofs(LogClient(channel), keeper)
        self._adapters = AdapterServiceStub(channel)
        self._bases = BaseModelServiceStub(channel)
        self._catalog: CatalogClient | None = None
        self._specs: dict[str, BaseSpec] = {}

    def follow(self, on_gone: Callable[[list[RevisionItem]], None]) -> None:
        self._catalog = CatalogClient(
            self._channel,
            artefacts_only=True,
            on_gone=on_gone,
            on_checkpoint=self._keeper.offer,
            on_root=self._on_root,
            floor=lambda: self._keeper.floor,
        )
        self._catalog.start()

    async def failed(self) -> None:
        await self._following.failed()

    async def item(self, revision_id: str) -> RevisionItem | None:
        catalog = self._following
        found = catalog.view.revisions.get(revision_id)
        if found is not None and found.state == "ACTIVE":
            return found
        fresh = await catalog.catch_up() and await catalog.wait_synced()
        if not fresh:
            raise LoraportError("REGISTRY_UNAVAILABLE", retry_after_s=1.0)
        return catalog.view.revisions.get(revision_id)

    def is_active(self, revision_id: str) -> bool:
        found = self._following.view.revisions.get(revision_id)
        return found is not None and found.state == "ACTIVE"

    def active_digest(self, digest: str) -> bool:
        return self._following.view.active_weights(digest)

    def needed(self) -> frozenset[str]:
        view = self._following.view
        names = {name for item in view.rollouts.values() for name in (item.from_revision_id, item.to_revision_id)}
        return frozenset(view.revisions[name].weights_digest for name in names if name in view.revisions)

    async def require_fresh(self) -> None:
        await self._keeper.require_fresh(lambda: self._following.view)

    def require_alive(self) -> None:
        self._keeper.require_alive()

    def seen(self) -> Seen | None:
        return self._keeper.seen

    @property
    def epoch(self) -> int:
        """The newest epoch of the catalog that has come."""
        return self._catalog.view.epoch if self._catalog is not None else 0

    def checks(self, clock: Clock) -> dict[str, Check]:
        """Checks for `loraport doctor`; once the catalog is followed."""
        return {"catalog": catalog_synced(self._following), "checkpoint": checkpoint(self._keeper, clock)}

    async def require_logged(self, item: RevisionItem) -> None:
        await self._proofs.require_logged(item)

    async def revision(self, revision_id: str) -> RevisionInfo:
        revision = await ask_registry(
            self._adapters.GetRevision, adapters.GetRevisionRequest(name=revision_id), timeout_s=CALL_S
        )
        if revision.revision_id != revision_id:
            raise LoraportError("DIGEST_MISMATCH", "the registry answered with another revision")
        return RevisionInfo(
            revision_id=revision.revision_id,
            state=_state(revision),
            manifest_envelope=revision.manifest_envelope,
            reasons=_rows(revision.reasons),
            warnings=_rows(revision.warnings),
        )

    async def base_spec(self, base_model: str) -> BaseSpec:
        known = self._following.view.bases.get(base_model)
        if known is not None and known.base_id in self._specs:
            return self._specs[known.base_id]
        request = bases.GetBaseModelRequest(name=base_model_name(base_model))
        answer = await ask_registry(self._bases.GetBaseModel, request, timeout_s=CALL_S)
        try:
            spec = await asyncio.to_thread(_read_spec, answer.spec_json, answer.base_id)
        except (StrictJsonError, ValueError) as error:
            log.error("base model is not usable", base_model=base_model, why=str(error))
            raise LoraportError("INVALID_BASE_MODEL", "the registry's base model is not usable") from None
        if len(self._specs) >= MAX_SPECS:
            self._specs.clear()
        self._specs[answer.base_id] = spec
        return spec

    async def admit(self, verification_envelope: bytes) -> str:
        request = adapters.AdmitRevisionRequest(verification_envelope=verification_envelope)
        return _state(await ask_registry(self._adapters.AdmitRevision, request, timeout_s=CALL_S))

    async def close(self) -> None:
        if self._catalog is not None:
            await self._catalog.stop()
        await self._keeper.close()
        await self._channel.close()

    @property
    def _following(self) -> CatalogClient:
        assert self._catalog is not None, "follow comes first"
        return self._catalog


def _read_spec(spec_json: bytes, identity: str) -> BaseSpec:
    spec = from_json(load_strict(spec_json, max_bytes=MAX_SPEC_BYTES, max_depth=6))
    if base_id(spec) != identity:
        raise ValueError("the digests are not those of its id")
    return spec


def _state(revision: Any) -> str:
    return adapters.Revision.State.Name(revision.state).removeprefix("STATE_")


def _rows(violations: Any) -> tuple[tuple[str, str, str], ...]:
    return tuple((row.code, row.detail, row.subject) for row in violations)
