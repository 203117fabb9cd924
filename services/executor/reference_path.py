"""A probe's second opinion: the same revision from its sealed bytes, read anew, by engine/reference.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.executor.engine.build import Device
from services.executor.engine.reference import reference_logprobs
from services.executor.intake import HostAdapter
from services.executor.ports import Loader, Registry, Stage
from services.executor.request import RefusalReason, Refused
from services.executor.sealed_bytes import read_sealed
from services.executor.wire import refusal
from services.shared.errors import LoraportError

# Attention without blocks makes a number for every pair of positions and head.
MAX_TOKENS = 2048
# How long the loader may take to give a revision's bytes.
READ_S = 60.0


class ReferencePath:
    """See the module's text. One prompt is one piece of work on the device thread, as long as a prefill of it."""

    def __init__(self, device: Device, *, loader: Loader, registry: Registry) -> None:
        self._device = device
        self._loader = loader
        self._registry = registry

    async def logprobs(self, revision_id: str, *, prompt: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """Return the log-probability of every token of `continuation` after `prompt`; an empty id is the base.

        Raises:
            LoraportError: PROMPT_TOO_LONG; why the bytes cannot be had; MERGED_MODE, the base's weights are not its own
                now.
        """
        if len(prompt) + len(continuation) > MAX_TOKENS:
            raise LoraportError("PROMPT_TOO_LONG", f"the reference computes at most {MAX_TOKENS} tokens")
        adapter, give_back = await self._host(revision_id)

        def compute() -> list[float]:  # on the device thread
            if self._device.engine.state().mode != "grouped":
                raise Refused(RefusalReason.MERGED_MODE, "the base's weights have a revision merged in")
            return reference_logprobs(self._device.decoder, adapter, prompt=prompt, continuation=continuation)

        try:
            return await asyncio.wrap_future(self._device.engine.ask(compute))
        except Refused as error:
            raise refusal(error) from None
        finally:
            # After a cancellation the device thread may still look at the bytes: the mapping is its own, and lasts.
            give_back()

    async def _host(self, revision_id: str) -> tuple[HostAdapter | None, Callable[[], None]]:
        if not revision_id:
            return None, lambda: None
        record = (await self._registry.standing(revision_id)).record
        try:
            async with asyncio.timeout(READ_S):
                host = await self._loader.fetch(revision_id, size_bytes=record.weights_size, on_stage=_unheard)
        except TimeoutError:
            raise LoraportError("LOADER_UNAVAILABLE", "the loader took too long", retry_after_s=1.0) from None
        try:
            return await asyncio.to_thread(read_sealed, record, host), host.give_back
        except Refused as error:
            host.give_back()
            raise refusal(error) from None
        except BaseException:
            host.give_back()
            raise


def _unheard(stage: Stage) -> None:
    """A probe is no load; its stages are nobody's story."""
