"""What tenants have used of their quotas, and whether one more call may come in. Pure: the clock is an argument.

    enter    before anything is looked up: calls at a time, calls that wait, calls a minute, tokens a minute. A refusal
             costs nothing, and is the same whatever the call names.
    use      once it is known which revision of the tenant's the call means: bytes in use, loads a minute
    tokens   as they become known; a call under way is never stopped, so a bucket may owe
    close    however it ends, once

What other routers let in counts as well, as far as it was heard (`hear`). While they are not heard, each router keeps
to its part of a quota, so together they let in no more than they may.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.shared.errors import LoraportError
from services.shared.quotas import NO_QUOTA, Quota, quota_exceeded

MINUTE_S = 60.0
# What to wait for where it depends on when other calls end.
RETRY_AFTER_S = 1.0
PER_MINUTE = ("requests_per_minute", "tokens_per_minute", "cold_loads_per_minute")
AT_ONCE = ("in_flight_count", "queued_count")
KEPT_HERE = (*PER_MINUTE, *AT_ONCE, "resident_bytes")
# How long a tenant that does nothing is still told of to other routers.
TELL_S = 120.0


class Bucket:
    """`limit` a minute, all of it at once if it is there. What was taken flows back evenly; below 0 it is owed."""

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._level = limit
        self._at = now

    def level(self, limit: float, now: float) -> float:
        """Returns what may be taken now. When the limit changes, what was used stays used."""
        gained = max(0.0, now - self._at) * self._limit / MINUTE_S
        self._level = min(self._limit, self._level + gained) + (limit - self._limit)
        self._limit, self._at = limit, max(now, self._at)
        return self._level

    def wait_s(self, amount: float, limit: float, now: float) -> float:
        """Returns in how many seconds `amount` may be taken if nobody else takes any: 0 now, infinity never."""
        missing = amount - self.level(limit, now)
        if missing <= 0:
            return 0.0
        return missing / limit * MINUTE_S if amount <= limit else math.inf

    def take(self, amount: float, limit: float, now: float) -> None:
        """Takes `amount`, whether it is there or not."""
        self._level = self.level(limit, now) - amount


@dataclass(frozen=True, slots=True)
class Use:
    """One router's word on one tenant: totals since it started, in the order of `PER_MINUTE`, and calls now."""

    totals: tuple[int, int, int]
    in_flight: int
    queued: int


@dataclass(frozen=True, slots=True)
class Line:
    """One quota of a tenant, as the admin plane shows it."""

    quota: str
    limit: int | None
    used: int
    total: int
    refused: int


@dataclass(slots=True)
class _Account:
    quota: Quota = NO_QUOTA
    buckets: dict[str, Bucket] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    queued: int = 0
    # Calls in flight by revision, its bytes, and calls that wait for its load.
    held: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)
    coming: Counter[str] = field(default_factory=Counter)
    active: float = 0.0


class Entry:
    """One call that was let in, until it is closed."""

    def __init__(self, quotas: "Quotas", tenant: str) -> None:
        self._quotas = quotas
        self.tenant = tenant
        self.waits = True
        self.open = True
        self.revision = ""
        self.loads = False

    def use(self, revision_id: str, size_bytes: int, *, resident: bool) -> None:
        """Notes the revision that the call uses; `resident` says that no load is needed.

        Raises:
            LoraportError: QUOTA_EXCEEDED; the entry stays open.
        """
        self._quotas.use(self, revision_id, size_bytes, resident=resident)

    def tokens(self, count: int) -> None:
        """Counts tokens of the prompt or of an answer."""
        self._quotas.charge(self.tenant, "tokens_per_minute", count)

    def began(self) -> None:
        """Notes that the answer has begun; again is harmless."""
        self._quotas.began(self)

    def close(self) -> None:
        """Ends the call; again is harmless."""
        self._quotas.close(self)

    def __enter__(self) -> "Entry":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Quotas:
    """See the module's text. `now` is any clock that does not go back, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._accounts: dict[str, _Account] = {}
        self._heard: dict[str, dict[str, Use]] = {}
        self.routers = 1
        self.linked = True

    def enter(self, tenant: str, quota: Quota) -> Entry:
        """Lets a call in.

        Raises:
            LoraportError: QUOTA_EXCEEDED; nothing was counted but the refusal.
        """
        account, now = self._account(tenant, quota), self._now()
        elsewhere = [told[tenant] for told in self._heard.values() if tenant in told] if self.linked else []
        for name, here in (("in_flight_count", account.in_flight), ("queued_count", account.queued)):
            limit = self._limit(account, name)
            there = sum(use.in_flight if name == "in_flight_count" else use.queued for use in elsewhere)
            if limit is not None and here + there >= limit:
                raise self._refusal(tenant, account, name, RETRY_AFTER_S)
        for name in ("requests_per_minute", "tokens_per_minute"):
            self._require(tenant, account, name, now)
        account.in_flight += 1
        account.queued += 1
        self.charge(tenant, "requests_per_minute", 1)
        return Entry(self, tenant)

    def use(self, entry: Entry, revision_id: str, size_bytes: int, *, resident: bool) -> None:
        """As `Entry.use`."""
        account = self._accounts[entry.tenant]
        if not account.held[revision_id]:
            limit = account.quota.resident_bytes
            if limit is not None and sum(account.sizes.values()) + size_bytes > limit:
                raise self._refusal(entry.tenant, account, "resident_bytes", RETRY_AFTER_S)
        if not resident and not account.coming[revision_id]:
            self._require(entry.tenant, account, "cold_loads_per_minute", self._now())
            self.charge(entry.tenant, "cold_loads_per_minute", 1)
        entry.revision = revision_id
        account.held[revision_id] += 1
        account.sizes[revision_id] = size_bytes
        if not resident:
            entry.loads = True
            account.coming[revision_id] += 1

    def charge(self, tenant: str, name: str, amount: int) -> None:
        """Counts against a quota per minute, over it if need be."""
        account, now = self._accounts[tenant], self._now()
        account.totals[name] += amount
        account.active = now
        limit = self._limit(account, name)
        if limit is not None:
            self._bucket(account, name, limit, now).take(amount, limit, now)

    def began(self, entry: Entry) -> None:
        """As `Entry.began`."""
        account = self._accounts[entry.tenant]
        if entry.waits:
            entry.waits = False
            account.queued -= 1
        if entry.loads:
            entry.loads = False
            _less(account.coming, entry.revision)

    def close(self, entry: Entry) -> None:
        """As `Entry.close`."""
        if not entry.open:
            return
        entry.open = False
        self.began(entry)
        account = self._accounts[entry.tenant]
        account.in_flight -= 1
        account.active = self._now()
        if entry.revision and not _less(account.held, entry.revision):
            del account.sizes[entry.revision]

    def lines(self, tenant: str, quota: Quota) -> list[Line]:
        """Returns what a tenant has used, one line for each of `KEPT_HERE`, other routers' calls included."""
        account, now = self._account(tenant, quota), self._now()
        elsewhere = [told[tenant] for told in self._heard.values() if tenant in told]
        used = {
            "in_flight_count": account.in_flight + sum(use.in_flight for use in elsewhere),
            "queued_count": account.queued + sum(use.queued for use in elsewhere),
            "resident_bytes": sum(account.sizes.values()),
        }
        for name in PER_MINUTE:
            limit = self._limit(account, name)
            left = self._bucket(account, name, limit, now).level(limit, now) if limit is not None else 0.0
            used[name] = math.ceil(limit - left) if limit is not None else 0
        return [
            Line(name, getattr(quota, name), used[name], account.totals[name], account.refused[name])
            for name in KEPT_HERE
        ]

    def told(self) -> dict[str, Use]:
        """Returns what other routers should hear: the tenants that did something of late."""
        since = self._now() - TELL_S
        return {
            tenant: Use(
                (
                    account.totals["requests_per_minute"],
                    account.totals["tokens_per_minute"],
                    account.totals["cold_loads_per_minute"],
                ),
                account.in_flight,
                account.queued,
            )
            for tenant, account in self._accounts.items()
            if account.in_flight or account.active >= since
        }

    def hear(self, routers: Mapping[str, Mapping[str, Use]], quota_of: Callable[[str], Quota]) -> None:
        """Takes the words of the other routers that are alive: what is new in their totals was used up as well.

        It counts against `quota_of` the tenant, also of one that never asked anything of this router.
        """
        heard = {}
        for router, told in routers.items():
            before = self._heard.get(router)
            for tenant, use in told.items():
                # A router that was not known yet says what it did in all its life: that is no news.
                known = before.get(tenant, _NOTHING) if before is not None else use
                new = [now - then for now, then in zip(use.totals, known.totals, strict=True)]
                if any(new):
                    self._take(self._account(tenant, quota_of(tenant)), new)
            # Who is not told of any more is idle there; its totals go on where they were.
            idle = {tenant: Use(use.totals, 0, 0) for tenant, use in (before or {}).items()}
            heard[router] = {**idle, **told}
        self._heard = heard
        self.routers, self.linked = 1 + len(routers), True

    def lost(self) -> None:
        """Notes that the others are not heard: from now on each keeps to its part."""
        self.linked = False

    def _take(self, account: _Account, amounts: list[int]) -> None:
        now = self._now()
        for name, amount in zip(PER_MINUTE, amounts, strict=True):
            limit = self._limit(account, name)
            if limit is not None and amount > 0:
                self._bucket(account, name, limit, now).take(amount, limit, now)

    def _account(self, tenant: str, quota: Quota) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
        if account.quota is not quota:
            account.quota = quota
            for name in set(account.buckets) - set(quota.given()):
                del account.buckets[name]
        return account

    def _limit(self, account: _Account, name: str) -> float | None:
        limit: int | None = getattr(account.quota, name)
        if limit is None or self.linked or self.routers == 1:
            return limit
        # A part of what a tenant may do one at a time is still one.
        part = limit / self.routers
        return part if name == "tokens_per_minute" else float(max(math.floor(part), min(limit, 1)))

    @staticmethod
    def _bucket(account: _Account, name: str, limit: float, now: float) -> Bucket:
        if name not in account.buckets:
            account.buckets[name] = Bucket(limit, now)
        return account.buckets[name]

    def _require(self, tenant: str, account: _Account, name: str, now: float) -> None:
        limit = self._limit(account, name)
        wait_s = self._bucket(account, name, limit, now).wait_s(1, limit, now) if limit is not None else 0.0
        if wait_s > 0:
            raise self._refusal(tenant, account, name, wait_s)

    @staticmethod
    def _refusal(tenant: str, account: _Account, name: str, wait_s: float) -> LoraportError:
        account.refused[name] += 1
        limit = getattr(account.quota, name)
        delay = float(math.ceil(wait_s)) if limit > 0 and math.isfinite(wait_s) else None
        return quota_exceeded(tenant, name, limit, retry_after_s=delay)


_NOTHING = Use((0, 0, 0), 0, 0)


def _less(counter: Counter[str], key: str) -> int:
    counter[key] -= 1
    left = counter[key]
    if not left:
        del counter[key]
    return left
