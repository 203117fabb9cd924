"""The base models that this router can speak for: tokenizer from a directory, specification from the registry.

A base model is served once the registry's specification names the very tokenizer that was read. Until the registry
has answered it is not served yet; when the digests differ it never is, and the log says so.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import structlog

from loraport.bundle.base import base_id, from_json
from loraport.bundle.canonical import StrictJsonError, load_strict
from loraport.registry.v1 import base_model_service_pb2 as pb
from loraport.registry.v1 import base_model_service_pb2_grpc as stubs
from services.router.ports import Catalog
from services.router.text import BaseText
from services.shared import names
from services.shared.errors import LoraportError

log = structlog.get_logger()

ASK_TIMEOUT_S = 2.0
ASK_EVERY_S = 1.0
MAX_SPEC_BYTES, MAX_SPEC_DEPTH = 8 << 20, 8


@dataclass(frozen=True, slots=True)
class ServedBase:
    """A base model with everything the router needs of it."""

    base_model: str
    base_id: str
    text: BaseText
    vocab_size: int
    max_positions: int


class Bases:
    """See the module's text. `texts` maps base model ids to what was read from their directories."""

    def __init__(self, texts: Mapping[str, BaseText], *, catalog: Catalog, channel: grpc.aio.Channel) -> None:
        self._texts = dict(texts)
        self._catalog = catalog
        self._stub = stubs.BaseModelServiceStub(channel)
        self._served: dict[str, ServedBase] = {}
        # Base model → the base id that was refused.
        self._refused: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to ask the registry, in the running event loop."""
        self._task = asyncio.create_task(self._keep_asking())

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs in the background; it ends by `stop` or by a bug."""
        return (self._task,) if self._task is not None else ()

    async def stop(self) -> None:
        """Stops asking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def known(self) -> tuple[str, ...]:
        """Returns the base models that the catalog and this router both have, in order of id."""
        return tuple(sorted(set(self._texts) & set(self._catalog.view.bases)))

    def base_id(self, base_model: str) -> str:
        """Returns the id that the catalog gives a base model, empty when it has none of that name."""
        item = self._catalog.view.bases.get(base_model)
        return item.base_id if item is not None else ""

    async def get(self, base_model: str) -> ServedBase:
        """Returns a base model that is served.

        Raises:
            LoraportError: EXECUTOR_UNAVAILABLE when this router cannot serve it (yet).
        """
        if base_model not in self._served:
            await self._confirm(base_model)
        served = self._served.get(base_model)
        if served is None:
            raise LoraportError(
                "EXECUTOR_UNAVAILABLE", f"the base model {base_model} is not served here", retry_after_s=1.0
            )
        return served

    async def _keep_asking(self) -> None:
        while True:
            for base_model in self.known():
                if base_model not in self._served:
                    await self._confirm(base_model)
            await asyncio.sleep(ASK_EVERY_S)

    async def _confirm(self, base_model: str) -> None:
        """Asks the registry for the specification once, whoever waits for it."""
        async with self._lock:
            item, text = self._catalog.view.bases.get(base_model), self._texts.get(base_model)
            if item is None or text is None or base_model in self._served:
                return
            if self._refused.get(base_model) == item.base_id:
                return
            try:
                request = pb.GetBaseModelRequest(name=names.base_model_name(base_model))
                answer = await self._stub.GetBaseModel(request, timeout=ASK_TIMEOUT_S)
            except grpc.RpcError as error:
                log.warning("base model not confirmed", base_model=base_model, code=error.code().name)  # type: ignore[attr-defined]
                return
            try:
                self._served[base_model] = _served(base_model, item.base_id, answer.spec_json, text)
                log.info("base model is served", base_model=base_model, base_id=item.base_id)
            except (ValueError, StrictJsonError) as error:
                self._refused[base_model] = item.base_id
                log.error("base model is not served", base_model=base_model, why=str(error))


def _served(base_model: str, wanted_id: str, spec_json: bytes, text: BaseText) -> ServedBase:
    spec = from_json(load_strict(spec_json, max_bytes=MAX_SPEC_BYTES, max_depth=MAX_SPEC_DEPTH))
    if base_id(spec) != wanted_id:
        raise ValueError("the specification is not the one that the catalog names")
    if spec.tokenizer_digest != text.digest:
        raise ValueError(f"its tokenizer is {spec.tokenizer_digest}, the one read here is {text.digest}")
    return ServedBase(base_model, wanted_id, text, spec.vocab_size, spec.max_positions)
