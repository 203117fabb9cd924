"""Tells watchers that the catalog has changed or that there is a new checkpoint. It carries an epoch and the newest
checkpoint, nothing else: each watcher reads at its own pace, so a slow one delays nobody and misses nothing."""

import asyncio

from services.shared.errors import LoraportError


class EpochHub:
    """The newest epoch that this process has heard of. Its methods belong to one event loop."""

    def __init__(self) -> None:
        self._epoch = 0
        self._closed = False
        self._checkpoint = b""
        self._edition = 0
        self._changed = asyncio.Event()

    @property
    def epoch(self) -> int:
        """The newest epoch that was noted."""
        return self._epoch

    @property
    def closed(self) -> bool:
        """Whether every wait has ended."""
        return self._closed

    @property
    def checkpoint(self) -> tuple[int, bytes]:
        """The newest checkpoint's number and envelope; (0, empty) before the first."""
        return self._edition, self._checkpoint

    def publish(self, envelope: bytes) -> None:
        """Notes a new checkpoint."""
        self._edition += 1
        self._checkpoint = envelope
        self._wake()

    def advance(self, epoch: int) -> None:
        """Notes an epoch; an older one than before is ignored."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._wake()

    def close(self) -> None:
        """Ends every wait."""
        self._closed = True
        self._wake()

    async def wait_above(self, epoch: int, *, edition: int | None = None) -> None:
        """Returns once an epoch above `epoch` was noted, or a checkpoint above `edition` if that is given.

        Raises:
            LoraportError: DRAINING, the hub was closed.
        """
        while not self._closed:
            if self._epoch > epoch or (edition is not None and self._edition > edition):
                return
            await self._changed.wait()
        raise LoraportError("DRAINING", retry_after_s=1.0)

    def _wake(self) -> None:
        # Whoever waits holds the old event; whoever comes later waits for the next one.
        self._changed.set()
        self._changed = asyncio.Event()
