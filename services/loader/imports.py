"""Imports: what `Upload` is told by a client, told by a source instead.

A fetched bundle becomes the same parts as an uploaded one and goes the same way; nothing that a source says is believed
because of where it came from. Fetches have threads of their own, so that slow sources hold up nobody else.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

import structlog

from services.loader.fetch.config import ImportSources
from services.loader.fetch.credentials import Credentials
from services.loader.fetch.download import Download
from services.loader.fetch.faults import FetchFault
from services.loader.fetch.http import Transport
from services.loader.fetch.sources import HttpsReference, Reference, RemoteFile, files_of
from services.loader.intake import Intake, Outcome
from services.loader.receive import MAX_CONFIG_BYTES, ChunkPart, Part
from services.loader.stages import Report
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.statements import UploadSession

log = structlog.get_logger()

RETRY_AFTER_S = 5.0


class Imports:
    """Fetches bundles into an intake. All methods belong to one event loop."""

    def __init__(
        self, intake: Intake, sources: ImportSources, *, transport: Transport, clock: Clock, max_fetches: int
    ) -> None:
        """Raises OSError when a file that `sources` names cannot be used."""
        self._intake = intake
        self._allowed = sources.allowed()
        self._credentials = Credentials(sources, clock=clock)
        self._transport = transport
        # The fetches bound themselves, each file by the same rate as uploads; this only has to be longer.
        self._patience_s = 2 * transport.limits.total_s(MAX_CONFIG_BYTES)
        self._threads = ThreadPoolExecutor(max_fetches, thread_name_prefix="fetch")

    async def run(self, session: bytes, reference: Reference) -> AsyncIterator[Report | Outcome]:
        """Yields stages as they end, the outcome last.

        Raises:
            LoraportError: as `Intake.upload`; SOURCE_NOT_ALLOWED, SOURCE_UNUSABLE, SOURCE_UNAVAILABLE.
        """
        events: asyncio.Queue[Report | None] = asyncio.Queue()
        task = asyncio.create_task(
            self._intake.fetch(
                session, partial(self._parts, reference), observe=events.put_nowait, patience_s=self._patience_s
            )
        )
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield await task
        finally:
            # Ends the fetch. A bundle that is complete is judged all the same, as an upload is.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Takes no further fetch."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _parts(self, reference: Reference, session: UploadSession) -> AsyncGenerator[Part, None]:
        """Returns the parts of a bundle. Raises LoraportError (SOURCE_NOT_ALLOWED) before anything is asked."""
        # Hosts of stores and of the hub are the operator's to know; the caller names other things there.
        named = isinstance(reference, HttpsReference)
        with _typed(session, named=named):
            config, weights = files_of(reference, self._allowed, tenant=session.tenant)
        return self._fetch(config, weights, session, named=named)

    async def _fetch(
        self, config: RemoteFile, weights: RemoteFile, session: UploadSession, *, named: bool
    ) -> AsyncGenerator[Part, None]:
        wanted: tuple[tuple[Literal["config", "weights"], RemoteFile, int, int | None], ...] = (
            ("config", config, MAX_CONFIG_BYTES, None),
            ("weights", weights, session.weights_size, session.weights_size),
        )
        for name, file, max_bytes, size_bytes in wanted:
            download = Download(
                self._transport,
                file,
                max_bytes=max_bytes,
                size_bytes=size_bytes,
                credentials=partial(self._credentials.headers, file, tenant=session.tenant),
                authorities=self._credentials.authorities(file),
            )
            try:
                with _typed(session, named=named):
                    while piece := await self._in_thread(download.next_piece):
                        yield ChunkPart(name, piece)
            finally:
                await asyncio.to_thread(download.close)

    async def _in_thread(self, work: Callable[[], bytes]) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


@contextlib.contextmanager
def _typed(session: UploadSession, *, named: bool) -> Iterator[None]:
    """Lets faults of a source out as errors of ours; whoever `named` the hosts is told more than the code means."""
    try:
        yield
    except FetchFault as fault:
        log.warning(
            "source refused", code=fault.code, why=fault.detail, revision_id=session.revision_id, tenant=session.tenant
        )
        raise LoraportError(
            fault.reason,
            f"{fault.code}: {fault.detail if named else fault.meaning}",
            retry_after_s=RETRY_AFTER_S if fault.reason == "SOURCE_UNAVAILABLE" else None,
            metadata={"fault": fault.code},
        ) from None
