"""One router's decisions: whose turn it is, where that request goes, and what it is charged. Pure.

    offer ──> next ──> Grant: begun (its load is over, and what of the prompt is there), decoded (tokens came), release

`next` asks the queue for the tenant with the least counter, whose request placement puts on an executor; the ledger
charges what can be foretold, and the grant corrects it as the executor tells. Every grant explains itself.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from services.router.capacity import Pool, PoolNeeds
from services.router.fair_queue import FairQueue, Turn, Waiting
from services.router.ledger import Bill, Ledger, is_rollout
from services.router.locality import Locality
from services.router.members import Flight, Members
from services.router.placement import Placed, Wish, place
from services.router.popularity import Popularity
from services.router.prices import PriceBook, Prices

# A request that waits for room in an adapter pool for so long makes a running revision give way.
STARVES_S = 1.0
# Admissions that are kept to be looked at.
MAX_STORIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Why one request was admitted when and where it was. Times in seconds on the monotonic clock, work in ms."""

    request_id: str
    tenant: str
    revision_id: str
    executor: str
    at: float
    waited_s: float
    counter_ms: float
    next_ms: float | None
    passed: bool
    cold: bool
    prefill_ms: float
    load_ms: float
    why: str

    def text(self) -> str:
        """Returns it as a sentence."""
        if self.next_ms is None:
            turn = "nobody else waited that may run"
        else:
            turn = f"its counter was {self.counter_ms:.0f} ms, the next {self.next_ms:.0f} ms"
        passed = "; passed an older request of its tenant that needs a load" if self.passed else ""
        load = f", load {self.load_ms:.0f} ms" if self.cold else ""
        return f"{turn}{passed}; {self.executor}: {self.why}; charged prefill {self.prefill_ms:.0f} ms{load}"


class Grant:
    """The right to run one request on one executor, until it is released."""

    def __init__(
        self, request: Waiting, dispatch: "Dispatch", placed: Placed, flight: Flight, bill: Bill, *, joined: bool
    ) -> None:
        self.request = request
        self.story: Story | None = None
        self._dispatch = dispatch
        self._placed = placed
        self._flight = flight
        self._bill = bill
        # The load that it waits for is another request's.
        self._joined = joined
        # Of the prompt, what the executor has: likely, and by its word once it has begun.
        self._known = placed.matched_tokens
        self._tokens = 0
        self._computed = False
        self._released = False

    @property
    def executor(self) -> str:
        """Name of the executor."""
        return self._flight.executor

    def begun(self, load_ms: float, cached_tokens: int, *, now: float) -> None:
        """The executor has begun the request; `load_ms` is what it spent on the load, 0 when the revision was there,
        `cached_tokens` how much of the prompt it has."""
        tokens = max(0, self.request.prompt_tokens - cached_tokens)
        self._flight.begun(tokens)
        self._known = cached_tokens
        self._dispatch.locality.told(
            self.executor, self.request.tenant, guessed=self._placed.matched_tokens, had=cached_tokens
        )
        self._bill.computed(self._dispatch.prices_of(self.request).prefill_ms(tokens))
        if load_ms > 0 and self._placed.cold:
            self._dispatch.prices.observe_load(self.request.base_model, mib=self.request.mib, ms=load_ms)
        # A load that others wait for as well is paid by the one that caused it.
        self._bill.loaded(0.0 if self._joined else load_ms)
        self._dispatch.worked(self.request, self._bill.prefill_ms, now=now)

    def decoded(self, tokens: int, *, now: float) -> None:
        """The executor has computed the prompt, and made so many tokens more."""
        request = self.request
        self._computed = True
        self._flight.computed()
        self._tokens += tokens
        work = self._dispatch.prices_of(request).decode_ms(
            tokens=tokens,
            context=request.prompt_tokens + self._tokens // max(1, request.answers),
            adapter_mib=request.mib if request.revision_id else 0.0,
            sharing=self._dispatch.sharing(self.executor, request.revision_id),
        )
        self._bill.decode(work)
        self._dispatch.worked(request, work, now=now)

    def uncharge(self) -> None:
        """Gives the prompt's charge back: the request goes back to the queue, where it is charged again."""
        self._bill.computed(0.0)

    def move(self, placed: Placed, flight: Flight, *, joined: bool, load_ms: float) -> None:
        """Puts the request on another executor; the load that it caused on the first stays charged."""
        self._forget()
        old, self._flight, self._placed = self._flight, flight, placed
        self._joined, self._known = joined, placed.matched_tokens
        self._bill.moved(load_ms)
        old.release()

    def _forget(self) -> None:
        """What was not computed of the prompt is not there."""
        if not self._computed:
            self._dispatch.locality.unsent(self.executor, self.request.prefix, known=self._known)

    def release(self) -> None:
        """Gives the place back; once is enough."""
        if not self._released:
            self._released = True
            self._forget()
            self._dispatch.ended(self)
            self._flight.release()


class Dispatch:
    """See the module's text."""

    def __init__(
        self, queue: FairQueue, members: Members, ledger: Ledger, prices: PriceBook, locality: Locality | None = None
    ) -> None:
        self.queue = queue
        self.members = members
        self.ledger = ledger
        self.prices = prices
        self.locality = locality or Locality()
        self.popularity = Popularity(most=len(members.view().executors))
        self.needs = PoolNeeds()
        self.stories: deque[Story] = deque(maxlen=MAX_STORIES)
        # Revision → the tenant that used it last, for what its idle room costs.
        self._users: dict[str, str] = {}
        self._held_at: float | None = None
        # Called after every change that may let a request go.
        self.on_change: Callable[[], None] = lambda: None
        members.on_change = self._changed

    def offer(self, request: Waiting) -> None:
        """Accepts a request into its tenant's queue. Raises as `FairQueue.offer`."""
        self.queue.offer(request)

    def close_accounts(self, running: Collection[str]) -> None:
        """Closes the accounts of rollouts that are not among those that run and have nothing under way."""
        for account in [*filter(is_rollout, self.ledger.accounts)]:
            if account not in running and not self.queue.knows(account):
                self.ledger.close(account)

    def next(self, now: float) -> Grant | None:
        """Takes the next request that can go now; None when there is none."""
        if not len(self.queue):
            return None  # before the fleet is looked at: that costs, and most changes find nobody waiting
        turn = self.queue.take(
            self.members.view().bases_with_room(), lambda request: self._place(request, now), now=now
        )
        return self._grant(turn, now) if turn is not None else None

    def move(self, grant: Grant, excluded: frozenset[str], *, now: float) -> bool:
        """Moves a granted request to an executor that is not `excluded`; False when none has room now."""
        placed = self._place(grant.request, now, excluded)
        if placed is None:
            return False
        joined, load_ms = self._load(grant.request, placed)
        grant.move(placed, self._begin(grant.request, placed, now), joined=joined, load_ms=load_ms)
        return True

    def sweep(self, now: float) -> list[Waiting]:
        """Does what time alone calls for, and returns the requests that waited too long."""
        over = self.queue.expire(now)
        self._charge_holds(now)
        for base_model in self.queue.bases():
            self._relieve(base_model, now)
            self.queue.wake(base_model)
        return over

    def wish(self, request: Waiting, now: float, excluded: frozenset[str] = frozenset()) -> Wish:
        """Returns what placement must know of a request."""
        if request.only:
            excluded |= {executor.name for executor in self.members.view().executors if executor.name != request.only}
        return Wish(
            request.base_model,
            request.revision_id,
            request.rank,
            excluded,
            tenant=request.tenant,
            weight=request.weight,
            prompt_tokens=request.prompt_tokens,
            mib=request.mib,
            length=request.length,
            matches=self.locality.match(request.prefix),
            doubted=self.locality.doubted(request.tenant),
            last=self.locality.last(request.tenant, request.revision_id, request.session),
            replicas=self.popularity.replicas(request.revision_id, now) if request.revision_id else 1,
            now=now,
        )

    def pools(self, now: float) -> list[Pool]:
        """Returns every executor's pool beside what it was asked for of late."""
        executors = self.members.view().executors
        return [Pool(e.name, e.base_model, e.page_count, self.needs.need(e.name, now)) for e in executors]

    def prices_of(self, request: Waiting) -> Prices:
        """Returns the prices that a request is charged at."""
        return self.prices.of(request.base_model)

    def sharing(self, executor: str, revision_id: str) -> int:
        """Returns how many of this router's rows on an executor use a revision."""
        return self.members.rows(executor, revision_id)

    def worked(self, request: Waiting, work_ms: float, *, now: float) -> None:
        """Counts work for the number of homes of its revision."""
        if request.revision_id:
            self.popularity.worked(request.revision_id, work_ms, now)

    def ended(self, grant: Grant) -> None:
        """Takes a released grant out of the queue's books."""
        self.queue.finish(grant.request.id)

    def _place(self, request: Waiting, now: float, excluded: frozenset[str] = frozenset()) -> Placed | None:
        return place(self.members.view(), self.wish(request, now, excluded), self.prices_of(request))

    def _grant(self, turn: Turn[Placed], now: float) -> Grant:
        request, placed = turn.request, turn.place
        prefill_ms = self.prices_of(request).prefill_ms(placed.tokens)
        joined, load_ms = self._load(request, placed)
        bill = self.ledger.open(request.tenant, prefill_ms=prefill_ms, load_ms=load_ms)
        grant = Grant(request, self, placed, self._begin(request, placed, now), bill, joined=joined)
        grant.story = Story(
            request_id=request.id,
            tenant=request.tenant,
            revision_id=request.revision_id,
            executor=placed.executor,
            at=now,
            waited_s=now - request.arrived,
            counter_ms=turn.counter_ms,
            next_ms=turn.next_ms,
            passed=turn.passed,
            cold=placed.cold,
            prefill_ms=prefill_ms,
            load_ms=load_ms,
            why=placed.why,
        )
        self.stories.append(grant.story)
        return grant

    def _load(self, request: Waiting, placed: Placed) -> tuple[bool, float]:
        """Returns whether another request's load is under way there, and what the one that begins will likely take."""
        joined = request.revision_id in self.members.executor(placed.executor).loading
        return joined, self.prices_of(request).load_ms(request.mib) if placed.cold else 0.0

    def _begin(self, request: Waiting, placed: Placed, now: float) -> Flight:
        self.locality.sent(placed.executor, request.prefix)
        self.locality.served(request.tenant, request.revision_id, request.session, placed.executor)
        pages, turn_s = 0, 0.0
        if request.revision_id:
            self._users[request.revision_id] = request.tenant
            executor = self.members.executor(placed.executor)
            pages = executor.pages_for(request.rank)
            self.needs.used(
                placed.executor, request.revision_id, tenant=request.tenant, pages=pages, cold=placed.cold, now=now
            )
            if placed.cold:
                turn_s = executor.turn_s(
                    request.revision_id, request.rank, tenant=request.tenant, weight=request.weight, now=now,
                    load_ms=self.prices_of(request).load_ms(request.mib),
                )  # fmt: skip
        return self.members.begin(
            placed.executor,
            request.revision_id,
            tenant=request.tenant,
            answers=request.answers,
            now=now,
            weight=request.weight,
            tokens=placed.tokens,
            pages=pages,
            turn_s=turn_s,
            cold=placed.cold,
        )

    def _relieve(self, base_model: str, now: float) -> None:
        """Makes a running revision give way to one that has waited for room in a pool for too long."""
        starving = self.queue.longest_parked(base_model)
        if starving is None or now - starving.arrived < STARVES_S or not starving.revision_id:
            return
        executors = [e for e in self.members.view().of_base(base_model) if e.serving and e.page_rows]
        if not executors or any(
            e.holds(starving.revision_id) or e.pages_for(starving.rank) <= e.free_pages + e.idle_pages
            for e in executors
        ):
            return
        least = min(executors, key=lambda e: (e.in_flight, e.name))
        self.members.give_way(least.name, pages=least.pages_for(starving.rank), now=now)

    def _charge_holds(self, now: float) -> None:
        """While somebody waits for room in a pool, the idle revisions there cost the tenants that keep them."""
        passed_ms, self._held_at = (now - (self._held_at if self._held_at is not None else now)) * 1000, now
        for base_model in self.queue.bases():
            waits = self.queue.longest_parked(base_model)
            if waits is None or not waits.revision_id:
                continue
            for executor in self.members.view().of_base(base_model):
                if executor.page_count and executor.pages_for(waits.rank) > executor.free_pages:
                    for key, held in executor.resident.items():
                        tenant = self._users.get(key)
                        if tenant is not None and key not in executor.busy and not self.queue.waits(tenant):
                            part = held.size_bytes / max(1, executor.report.pool_size_bytes if executor.report else 1)
                            self.ledger.charge_hold(tenant, passed_ms * part)

    def _changed(self, base_model: str) -> None:
        self.queue.wake(base_model)
        self.on_change()
