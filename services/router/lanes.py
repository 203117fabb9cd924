"""Turns for tokenizing long text: one at a time for each tenant, a few in all.

A megabyte of text takes seconds of a core, and the worker threads serve everybody. Short text needs no turn, so it
never waits behind long text, whoever sent that.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from services.shared.errors import LoraportError
from services.shared.futures import fault_of

# Text up to here, in characters, takes milliseconds.
SHORT_CHARS = 4 << 10
# Long texts at a time, in all, and of one tenant that wait or run.
LANES, MAX_OPEN = 2, 16
RETRY_AFTER_S = 1.0


class Lanes:
    """See the module's text. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lanes = asyncio.Semaphore(LANES)
        # A tenant waits for a lane with one text only, so that lanes go round the tenants.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._open: Counter[str] = Counter()

    async def run(self, tenant: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs `function` in a thread in the tenant's turn. A caller that is cancelled leaves it running to its end,
        and its lane taken as long: else a caller could have more threads than lanes by leaving early.

        Raises:
            LoraportError: OVERLOADED, too many long texts of the tenant are open.
        """
        if self._open[tenant] >= MAX_OPEN:
            detail = f"{MAX_OPEN} long prompts of this tenant are being read already"
            raise LoraportError("OVERLOADED", detail, retry_after_s=RETRY_AFTER_S)
        self._open[tenant] += 1
        turn = self._turns[tenant]
        try:
            await turn.acquire()
            try:
                await self._lanes.acquire()
            except BaseException:
                turn.release()
                raise
        except BaseException:
            self._leave(tenant)
            raise

        def ended(work: asyncio.Future[Any]) -> None:
            self._lanes.release()
            turn.release()
            self._leave(tenant)
            fault_of(work)  # looked at here: whoever waited may be gone

        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        work.add_done_callback(ended)
        return await asyncio.shield(work)

    def _leave(self, tenant: str) -> None:
        self._open[tenant] -= 1
        if not self._open[tenant]:
            # Nobody of the tenant holds or awaits its turn.
            del self._open[tenant]
            self._turns.pop(tenant, None)
