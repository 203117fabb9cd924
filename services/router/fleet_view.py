"""The fleet at one moment, as placement and the admin plane see it: frozen values only.

What an executor holds comes from its own reports, never from what was sent to it. What was sent to it is shown beside
that, as `expected`: it says where a load is likely under way.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loraport.values import DRAINING
from services.router.working_set import WorkingSet
from services.shared.residency import SPARE, Notice, Resident

# Why an executor is sent nothing that an operator drained at this router.
DRAINED = "is drained by an admin"
# At most one in so many of an executor's places is kept free for tenants that used them of late, from a tenant that has
# twice its part or more; from one that has little more than its part, accordingly fewer.
KEPT = 2
# How long a tenant's most answers at a time, and the revisions it asked for, count as used of late.
PEAK_S = 10.0
# Prompt tokens of a tenant that an executor may have to compute still when the tenant sends it one more request: about
# two steps full. More would only wait there; longer ones of its own do not count, for those it passes there.
MAX_AHEAD = 1024
# Loads that this router has under way on one executor at a time, in all and of a tenant that is not alone there: a link
# serves one after the other, and what waits here can still be overtaken by a tenant that has used less.
MAX_LOADS, MAX_OWN_LOADS = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorView:
    """One executor.

    `serving` says whether it may be sent requests, `why_not` why it may not. `in_flight` counts the answers that this
    router awaits there, `held` them by tenant, `peaks` the most of late. `ahead` are the prompts, by tenant and in
    tokens, that it has to compute still. Who may be sent there, `has_place` says: of the `window` places, some that
    other tenants had of late are kept for them, up to their parts; `reserve` more are for tenants that have less than
    that.
    `loading` are the revisions whose loads this router has under way there, and for which tenants; `draining` those
    that get no further request there, because one that must be loaded waits for their room. `busy` are revisions that
    somebody uses, `recent` what was asked for there of late, in pages. `turns` say from when on a tenant may take the
    room of what others use again.
    `max_rank`, `max_context` and the page sizes are 0 until the executor has reported them.
    """

    name: str
    base_model: str
    serving: bool
    why_not: str
    in_flight: int
    window: int
    resident: Mapping[str, Resident]
    expected: frozenset[str]
    reserve: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    ahead: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    loading: Mapping[str, str] = field(default_factory=dict)
    recent: WorkingSet = field(default_factory=WorkingSet)
    turns: Mapping[str, float] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    busy: frozenset[str] = frozenset()
    page_rows: int = 0
    free_pages: int = 0
    # Pages of idle revisions, which can make room.
    idle_pages: int = 0
    page_count: int = 0
    max_rank: int = 0
    max_context: int = 0
    report: Notice | None = None

    @property
    def drained(self) -> bool:
        """Whether it is sent nothing because somebody wants it so, at this router or by the executor's own word."""
        return self.why_not in (DRAINED, DRAINING)

    @property
    def has_room(self) -> bool:
        """Whether one more request of some tenant may be sent to it."""
        return self.serving and self.in_flight < self.window + self.reserve

    def has_place(self, tenant: str, weight: float = 1.0, tokens: int = MAX_AHEAD) -> bool:
        """Whether one more request of this tenant, with so many tokens to compute, may be sent to it. Parts are by
        weight."""
        if not self.has_room or self.is_ahead(tenant, tokens):
            return False
        own = self.held.get(tenant, 0)
        total = self._total(tenant, weight)
        part = math.ceil(self.window * weight / total)
        if own < part:
            return True
        kept = sum(
            max(0, min(math.ceil(self.window * self.weights.get(other, 1.0) / total), peak) - self.held.get(other, 0))
            for other, peak in self.peaks.items()
            if other != tenant
        )
        return self.in_flight + min(kept, self.window // KEPT) * min(1.0, own / part - 1.0) < self.window

    def _part(self, tenant: str, weight: float) -> float:
        """Returns a tenant's part of this executor, by weight among those that used it of late."""
        return weight / self._total(tenant, weight)

    def _total(self, tenant: str, weight: float) -> float:
        return weight + sum(self.weights.get(other, 1.0) for other in {*self.held, *self.peaks} - {tenant})

    def displaces(self, revision_id: str, rank: int, *, tenant: str, weight: float, now: float) -> bool:
        """Whether a load takes room of what others used here of late, for more than its tenant's part and a quarter."""
        own, others = self.recent.others(tenant, revision_id, now)
        pages, most = self.pages_for(rank), self.page_count * (self._part(tenant, weight) + 1 / SPARE)
        return own + pages > most and others + pages > self.page_count > 0

    def must_wait(self, revision_id: str, rank: int, *, tenant: str, weight: float, now: float) -> bool:
        """Whether a tenant that took others' room a moment ago would do so again."""
        until = self.turns.get(tenant, now)
        return now < until and self.displaces(revision_id, rank, tenant=tenant, weight=weight, now=now)

    def turn_s(
        self, revision_id: str, rank: int, *, tenant: str, weight: float, now: float, load_ms: float
    ) -> float:  # fmt: skip
        """Returns how long a tenant must leave others' room alone after this load: until the link has had time for a
        turn of everybody. 0 when it takes none."""
        if not self.displaces(revision_id, rank, tenant=tenant, weight=weight, now=now):
            return 0.0
        return min(load_ms / 1000 / self._part(tenant, weight), PEAK_S)

    def is_ahead(self, tenant: str, tokens: int = MAX_AHEAD) -> bool:
        """Whether it has as many prompt tokens of this tenant to compute as it may, before so many more: longer prompts
        of the same tenant are passed there."""
        return sum(ahead for ahead in self.ahead.get(tenant, ()) if ahead <= tokens) >= MAX_AHEAD

    def pages_for(self, rank: int) -> int:
        """Returns the pages of a revision, 0 while the executor has not said how large they are."""
        return -(-rank // self.page_rows) if self.page_rows else 0

    def may_load(self, tenant: str) -> bool:
        """Whether one more load may begin for this tenant."""
        own = MAX_OWN_LOADS if self.peaks.keys() - {tenant} else MAX_LOADS
        return len(self.loading) < MAX_LOADS and list(self.loading.values()).count(tenant) < own

    def holds(self, revision_id: str) -> bool:
        """Whether a revision is there, or on its way, and may be used."""
        if revision_id in self.draining:
            return False
        resident = self.resident.get(revision_id)
        return revision_id in self.expected or (resident is not None and resident.state in ("READY", "LOADING"))


@dataclass(frozen=True, slots=True)
class FleetView:
    """All executors, in order of name."""

    executors: tuple[ExecutorView, ...]

    def of_base(self, base_model: str) -> tuple[ExecutorView, ...]:
        """Returns the executors of a base model."""
        return tuple(executor for executor in self.executors if executor.base_model == base_model)

    def serves(self, base_model: str) -> bool:
        """Says whether an executor of this base model serves, with room or without."""
        return any(executor.serving for executor in self.of_base(base_model))

    def bases_with_room(self) -> frozenset[str]:
        """Returns the base models that an executor has room for."""
        return frozenset(executor.base_model for executor in self.executors if executor.has_room)

    def context_tokens(self, base_model: str, declared: int) -> int:
        """Returns how many tokens a prompt and its answer may take together on the roomiest executor.

        `declared` is what the model itself allows; executors that did not report count as that.
        """
        reported = [e.max_context or declared for e in self.of_base(base_model) if e.serving]
        return min(declared, max(reported, default=declared))


def newer(known: Notice | None, heard: Notice) -> Notice:
    """Returns the report that counts: the later of one process, or any of a later process. A tie goes to `heard`."""
    return heard if known is None or heard.order >= known.order else known
