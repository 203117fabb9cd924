"""What the tenants' calls need of each executor's adapter pool, and whether it fits there. Pure.

Counted is what was asked for within `WINDOW_S`. The working set of an executor are the revisions that were sent there,
in pages of its pool; the active set of a base model are those that were sent to any of its executors. A reload is a
load of a revision that had been loaded there within the window before: it was evicted and came back, which is what a
pool does that is too small. Ages, not times, are exchanged over the notice board: clocks need to agree on nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW_S = 300.0
MAX_KNOWN = 20_000
# Of what one report may tell, the revisions that were used last.
MAX_TOLD = 2000


@dataclass(slots=True)
class _Use:
    tenant: str
    pages: int
    at: float
    loaded: float | None = None
    loads: int = 0
    # When it was loaded again, and for whom.
    reloads: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Need:
    """What one executor was asked for in the window: `pages` of `revisions`; loads, reloads, and for whom these."""

    pages: int = 0
    revisions: frozenset[str] = frozenset()
    loads: int = 0
    reloads: int = 0
    thrashing: Mapping[str, int] = field(default_factory=dict)


class PoolNeeds:
    """See the module's text. Times are seconds on one clock that does not go back."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], _Use] = {}

    def used(self, executor: str, revision_id: str, *, tenant: str, pages: int, cold: bool, now: float) -> None:
        """Notes a call that is sent to an executor; `cold` says that its revision must be loaded there."""
        use = self._uses.get((executor, revision_id))
        if use is None:
            if len(self._uses) >= MAX_KNOWN:
                self._make_room(now)
            use = self._uses[executor, revision_id] = _Use(tenant, pages, now)
        use.at, use.tenant, use.pages = now, tenant, max(pages, use.pages)
        if cold:
            if use.loaded is not None and now - use.loaded < WINDOW_S:
                use.reloads.append((now, tenant))
            use.loaded = now
            use.loads += 1

    def need(self, executor: str, now: float) -> Need:
        """Returns what an executor was asked for in the window."""
        since = now - WINDOW_S
        uses = {key: use for (name, key), use in self._uses.items() if name == executor and use.at >= since}
        thrashing: dict[str, int] = {}
        for use in uses.values():
            for at, tenant in use.reloads:
                if at >= since:
                    thrashing[tenant] = thrashing.get(tenant, 0) + 1
        return Need(
            pages=sum(use.pages for use in uses.values()),
            revisions=frozenset(uses),
            loads=sum(use.loaded is not None and use.loaded >= since for use in uses.values()),
            reloads=sum(thrashing.values()),
            thrashing=thrashing,
        )

    def active_pages(self, executors: frozenset[str], now: float) -> tuple[int, int]:
        """Returns how many revisions were sent to any of `executors` in the window, and the pages of a copy of each."""
        pages: dict[str, int] = {}
        for (name, key), use in self._uses.items():
            if name in executors and use.at >= now - WINDOW_S:
                pages[key] = max(pages.get(key, 0), use.pages)
        return len(pages), sum(pages.values())

    def say(self, now: float) -> list[list[Any]]:
        """Returns what others should know, ages instead of times."""
        self._forget(now)
        newest = sorted(self._uses.items(), key=lambda item: -item[1].at)[:MAX_TOLD]
        return [
            [name, key, use.tenant, use.pages, now - use.at, None if use.loaded is None else now - use.loaded,
             [[now - at, tenant] for at, tenant in use.reloads]]
            for (name, key), use in newest
        ]  # fmt: skip

    def hear(self, told: list[list[Any]], now: float) -> None:
        """Takes over what another router, or this one before it was started again, has said. Hearing it twice changes
        nothing; what is not of the form of `say` raises ValueError, TypeError or IndexError and may be half taken."""
        for name, key, tenant, pages, age, loaded_age, reloads in told:
            at = now - max(0.0, float(age))
            if at < now - WINDOW_S or len(self._uses) >= MAX_KNOWN:
                continue
            use = self._uses.setdefault((str(name), str(key)), _Use(str(tenant), int(pages), at))
            use.at, use.pages = max(use.at, at), max(use.pages, int(pages))
            if loaded_age is not None:
                use.loaded = max(use.loaded or 0.0, now - max(0.0, float(loaded_age)))
            for reload_age, whose in reloads:
                again = now - max(0.0, float(reload_age))
                # The same reload comes back with every report, a little off for the clocks.
                if all(abs(again - known) > 1.0 or who != whose for known, who in use.reloads):
                    use.reloads.append((again, str(whose)))

    def _make_room(self, now: float) -> None:
        """Forgets what is past, and if that is little, what was used least recently as well: many at once, since it
        costs a look at all."""
        self._forget(now)
        if len(self._uses) > MAX_KNOWN - MAX_TOLD:
            newest = sorted(self._uses.items(), key=lambda item: -item[1].at)
            self._uses = dict(newest[: MAX_KNOWN - MAX_TOLD])

    def _forget(self, now: float) -> None:
        since = now - WINDOW_S
        self._uses = {key: use for key, use in self._uses.items() if use.at >= since}
        for use in self._uses.values():
            use.reloads = [(at, tenant) for at, tenant in use.reloads if at >= since]


@dataclass(frozen=True, slots=True)
class Pool:
    """An executor's pool beside what is needed of it."""

    executor: str
    base_model: str
    pages: int
    need: Need

    @property
    def fits(self) -> bool:
        """Whether its working set fits; a pool whose size is not known yet is not judged."""
        return not self.pages or self.need.pages <= self.pages


def verdict(pools: list[Pool], active: int) -> tuple[bool, str]:
    """Says whether the active set of a base model, `active` pages, fits the executors that serve it, and in words what
    would help."""
    total = sum(pool.pages for pool in pools)
    full = [pool.executor for pool in pools if not pool.fits]
    thrash = [pool.executor for pool in pools if pool.need.reloads]
    if not total:
        return True, "no executor has said how large its pool is"
    if active > total:
        return False, f"the active set no longer fits: {active} pages of {total}; add executors or pool memory"
    if full:
        return False, f"the active set fits the fleet, but not {', '.join(full)} as it is spread now"
    if thrash:
        return True, f"fits; {', '.join(thrash)} loaded again what had been there, so some calls came in bursts"
    return True, f"fits: {active} pages of {total}"
