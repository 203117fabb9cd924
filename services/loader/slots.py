"""How many things may happen at a time: in all, and for one key (a tenant, a revision)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Slots:
    """The key's own limit is taken first, so that one tenant's queue never stands in the way of another's turn.

    `total` None means that only the limit of the key counts.
    """

    def __init__(self, total: int | None, *, per_key: int) -> None:
        self._all = contextlib.nullcontext() if total is None else asyncio.Semaphore(total)
        self._per_key = per_key
        self._of_key: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @contextlib.asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it."""
        own, users = self._of_key.get(key, (asyncio.Semaphore(self._per_key), 0))
        self._of_key[key] = (own, users + 1)
        try:
            async with own, self._all:
                yield
        finally:
            own, users = self._of_key[key]
            if users == 1:
                del self._of_key[key]
            else:
                self._of_key[key] = (own, users - 1)
