"""Tells watchers that the catalog has changed. It carries an epoch and nothing else: each watcher reads at its own
pace, so a slow one delays nobody and misses nothing."""

import asyncio

from services.shared.errors import LoraportError


class EpochHub:
    """The newest epoch that this process has heard of. Its methods belong to one event loop."""

    def __init__(self) -> None:
        self._epoch = 0
        self._closed = False
        self._changed = asyncio.Event()

    def advance(self, epoch: int) -> None:
        """Notes an epoch; an older one than before is ignored."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._wake()

    def close(self) -> None:
        """Ends every wait."""
        self._closed = True
        self._wake()

    async def wait_above(self, epoch: int) -> None:
        """Returns once an epoch above `epoch` was noted.

        Raises:
            LoraportError: DRAINING, the hub was closed.
        """
        while not self._closed:
            if self._epoch > epoch:
                return
            await self._changed.wait()
        raise LoraportError("DRAINING", retry_after_s=1.0)

    def _wake(self) -> None:
        # Whoever waits holds the old event; whoever comes later waits for the next one.
        self._changed.set()
        self._changed = asyncio.Event()
