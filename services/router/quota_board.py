"""How routers hear of each other's calls, for quotas: one hash on the notice board, a field for each router.

What stands there can only make a router stricter: it adds to what a tenant has used, never to what it may. A word that
is garbage is no word. A router is alive while its word changes; who is silent for `SILENT_S` has no calls any more.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog
import valkey.asyncio
from valkey.exceptions import ValkeyError

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict
from services.router.quota import Quotas, Use
from services.shared.quotas import Quota

log = structlog.get_logger()

KEY = "loraport:quotas"
INTERVAL_S = 0.5
TIMEOUT_S = 0.5
# Silent so long: holds nothing; much longer: its field is removed by whoever sees it.
SILENT_S, FORGET_S = 5.0, 60.0
MAX_WORD = 1 << 20
MAX_ROUTERS = 256


def encode(told: dict[str, Use], sequence: int) -> bytes:
    """Returns a router's word."""
    rows = {tenant: [*use.totals, use.in_flight, use.queued] for tenant, use in told.items()}
    return canonical({"sequence": sequence, "tenants": rows})


def decode(word: bytes) -> tuple[int, dict[str, Use]] | None:
    """Returns sequence number and tenants of a word; None for what is none."""
    try:
        value = load_strict(word, max_bytes=MAX_WORD, max_depth=4)
        told = {}
        for tenant, row in value["tenants"].items():
            if len(row) != 5 or any(type(number) is not int or number < 0 for number in row):
                return None
            told[tenant] = Use((row[0], row[1], row[2]), row[3], row[4])
        sequence = value["sequence"]
    except (StrictJsonError, TypeError, KeyError, AttributeError):
        return None
    return (sequence, told) if type(sequence) is int else None


class QuotaBoard:
    """See the module's text. An empty `url` is a router that is alone. `quota_of` says what a tenant may use."""

    def __init__(
        self,
        url: str,
        quotas: Quotas,
        *,
        quota_of: Callable[[str], Quota],
        router: str,
        now: Callable[[], float],
    ) -> None:
        self._quotas = quotas
        self._quota_of = quota_of
        self._router = router
        self._now = now
        self._client = (
            valkey.asyncio.Valkey.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
            if url
            else None
        )
        self._sequence = 0
        # Router → its last word, and since when it has said the same.
        self._seen: dict[str, tuple[int, float]] = {}
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to tell and to hear, in the running event loop."""
        if self._client is not None:
            self._task = asyncio.create_task(self._run(), name="quota board")

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs in the background."""
        return (self._task,) if self._task is not None else ()

    async def stop(self) -> None:
        """Stops that and takes this router's word away."""
        if self._task is None or self._client is None:
            return
        # Not cancelled: the client library may take a cancellation in the middle of a call for a failure of the call.
        self._stopping.set()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._client.hdel(KEY, self._router)
        except (ValkeyError, OSError):
            log.info("quota board is away; the word stays until others remove it")
        await self._client.aclose()

    async def exchange(self) -> None:
        """Tells once and hears once; a board that is away leaves each router with its part."""
        assert self._client is not None
        self._sequence += 1
        try:
            await self._client.hset(KEY, self._router, encode(self._quotas.told(), self._sequence))
            words = await self._client.hgetall(KEY)
        except (ValkeyError, OSError) as error:
            if self._quotas.linked:
                log.warning("quota board is away", why=type(error).__name__)
            self._quotas.lost()
            return
        if not self._quotas.linked:
            log.info("quota board is back")
        gone = self._take(words)
        if gone:
            await self._remove(gone)

    def _take(self, words: dict[bytes, bytes]) -> list[str]:
        """Hears what is said; returns whose words are to be removed."""
        now, alive, gone = self._now(), {}, []
        for field, word in list(words.items())[:MAX_ROUTERS]:
            router = field.decode("ascii", "replace")
            said = decode(word)
            sequence = said[0] if said is not None else -1
            last, since = self._seen.get(router, (None, now))
            since = now if sequence != last else since
            self._seen[router] = (sequence, since)
            if now - since >= FORGET_S:
                gone.append(router)
                del self._seen[router]
            elif router != self._router and said is not None and now - since < SILENT_S:
                alive[router] = said[1]
        self._quotas.hear(alive, self._quota_of)
        return gone

    async def _remove(self, routers: list[str]) -> None:
        assert self._client is not None
        try:
            await self._client.hdel(KEY, *routers)
        except (ValkeyError, OSError):
            log.info("quota board is away; words of routers that are gone stay")

    async def _run(self) -> None:
        while not self._stopping.is_set():
            await self.exchange()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._stopping.wait()
