"""The notice board in Valkey or Redis. Losing it loses nothing: every call here may fail and says so quietly."""

import asyncio
from collections.abc import Sequence

import structlog
import valkey.asyncio
from valkey.exceptions import ValkeyError

from services.shared.checks import Finding
from services.shared.residency import TTL_S, Notice, decode, encode, key

log = structlog.get_logger()

TIMEOUT_S = 0.5
WORK, WORK_TTL_S = "work", 60
WORK_KEY = f"loraport:{WORK}"


def asked_to_end() -> bool:
    """Whether the running task was cancelled. A loop over the board asks: the client of the board may swallow a
    cancellation that comes in the middle of a call, and then nobody would ever hear of it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Board:
    """Notices of executors by name. An empty `url` is a board that is always empty."""

    def __init__(self, url: str) -> None:
        self._client = (
            valkey.asyncio.Valkey.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
            if url
            else None
        )
        self._up: bool | None = None

    async def put(self, notice: Notice) -> bool:
        """Writes a notice with its expiry; False when the board is away."""
        if self._client is None:
            return False
        try:
            await self._client.set(key(notice.executor), encode(notice), ex=TTL_S)
        except (ValkeyError, OSError) as error:
            return self._note(False, error)
        return self._note(True)

    async def get(self, executors: Sequence[str]) -> dict[str, Notice]:
        """Returns the notices that are there and readable; an absent board gives none."""
        if self._client is None or not executors:
            return {}
        try:
            values = await self._client.mget([key(name) for name in executors])
        except (ValkeyError, OSError) as error:
            self._note(False, error)
            return {}
        self._note(True)
        notices = [decode(value) for value in values if value]
        return {notice.executor: notice for notice in notices if notice is not None and notice.executor in executors}

    async def put_work(self, router: str, report: bytes) -> bool:
        """Writes what a router charged; False when the board is away."""
        return await self.put_report(WORK, router, report, ttl_s=WORK_TTL_S)

    async def get_work(self) -> dict[str, bytes]:
        """Returns the routers' reports that are there; an absent board gives none."""
        return await self.get_reports(WORK)

    async def drop_work(self, router: str) -> None:
        """Removes the report of a router that is gone."""
        await self.drop_report(WORK, router)

    async def put_report(self, kind: str, router: str, report: bytes, *, ttl_s: int) -> bool:
        """Writes a router's report of a kind; False when the board is away."""
        if self._client is None:
            return False
        try:
            await self._client.hset(f"loraport:{kind}", router, report)
            await self._client.expire(f"loraport:{kind}", ttl_s)
        except (ValkeyError, OSError) as error:
            return self._note(False, error)
        return self._note(True)

    async def get_reports(self, kind: str) -> dict[str, bytes]:
        """Returns the routers' reports of a kind that are there; an absent board gives none."""
        if self._client is None:
            return {}
        try:
            found = await self._client.hgetall(f"loraport:{kind}")
        except (ValkeyError, OSError) as error:
            self._note(False, error)
            return {}
        self._note(True)
        return {name.decode(errors="replace"): report for name, report in found.items()}

    async def drop_report(self, kind: str, router: str) -> None:
        """Removes a router's report of a kind."""
        if self._client is not None:
            try:
                await self._client.hdel(f"loraport:{kind}", router)
            except (ValkeyError, OSError) as error:
                self._note(False, error)

    async def check(self) -> Finding:
        """A check for `loraport doctor`."""
        if self._client is None:
            return Finding("GOOD", "none is configured")
        try:
            await self._client.ping()
        except (ValkeyError, OSError) as error:
            advice = "start it again; until then every service goes by its own view"
            return Finding("WARNING", f"does not answer: {type(error).__name__}", advice)
        return Finding("GOOD", "answers")

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _note(self, up: bool, error: Exception | None = None) -> bool:
        """Logs when the board comes or goes, not on every call."""
        if up != self._up:
            self._up = up
            log.info("notice board is back") if up else log.warning("notice board is away", why=type(error).__name__)
        return up
