"""A fleet on a simulated clock: real routing decisions between simulated callers and simulated executors.

A request is a story with exactly one end: answered, refused, failed or left. `World` keeps them, with what came of
another revision than was asked for.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from bench.sim.machine import PREFIX_TOKENS, Job, Machine, Model
from bench.sim.workloads import Call
from services.router.dispatch import Dispatch, Grant
from services.router.fair_queue import FairQueue, Waiting
from services.router.ledger import Ledger
from services.router.locality import Locality
from services.router.members import Members
from services.router.prices import PriceBook, Prices
from services.router.shared_work import EXCHANGE_S, STALE_S, SharedWork
from services.shared.errors import LoraportError

BASE = "base"
POLL_S = 1.0
SWEEP_S = 0.25
RETRY = ("EXECUTOR_UNAVAILABLE", "DRAINING")


class Clock:
    """Simulated time: things happen in order of time, then in order of planning."""

    def __init__(self) -> None:
        self.time = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def now(self) -> float:
        return self.time

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Plans something."""
        self._planned += 1
        heapq.heappush(self._events, (self.time + seconds, self._planned, function))

    def run(self, until: float) -> None:
        """Lets everything happen that is planned up to then."""
        while self._events and self._events[0][0] <= until:
            self.time, _, function = heapq.heappop(self._events)
            function()
        self.time = until


@dataclass(slots=True, eq=False)
class Story:
    """What became of one call. Times in simulated seconds; `ends` counts its ends, which must be one."""

    call: Call
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    tokens: int = 0
    ends: int = 0
    outcome: str = ""
    wrong: int = 0
    work_ms: float = 0.0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a fleet is made of."""

    executors: int = 1
    routers: int = 1
    model: Model = field(default_factory=Model)
    window: int = 32
    reserve: int = 4
    max_queued: int = 100_000
    max_running: int = 64
    residence_s: float = 1e9
    queue: Callable[[Ledger, int], FairQueue] | None = None
    weights: dict[str, float] = field(default_factory=dict)


class Router:
    """One router: the real decisions, and a relay that tries once more before the first token."""

    def __init__(self, name: str, world: "World") -> None:
        self.name = name
        self.world = world
        self.up = True
        self.start()

    def start(self) -> None:
        """Starts a process that knows nothing yet."""
        setup, world = self.world.setup, self.world
        self.ledger = Ledger()
        make = setup.queue
        if make is not None:
            self.queue = make(self.ledger, setup.max_running)
        else:
            self.queue = FairQueue(
                self.ledger,
                max_queued=setup.max_queued,
                max_running=setup.max_running,
                residence_s=setup.residence_s,
            )
        self.members = Members(dict.fromkeys(world.machines, BASE), window=setup.window, reserve=setup.reserve)
        prior = Prices(prefill=0.05, row=0.5, load=50.0, load_mib=1.0)
        self.dispatch = Dispatch(
            self.queue, self.members, self.ledger, PriceBook(prior), Locality(block_tokens=PREFIX_TOKENS)
        )
        self.dispatch.on_change = self.wake
        self.open: dict[str, _Open] = {}
        self._pumping = False
        self.up = True
        self.starts = getattr(self, "starts", 0) + 1
        self.shared = SharedWork(self.ledger, router=f"{self.name}#{self.starts}")

    def kill(self) -> None:
        """Ends the process: its callers' and its executors' connections break."""
        self.up = False
        for held in list(self.open.values()):
            held.close()
            self.world.end(held.story, "failed")
        self.open.clear()

    def ask(self, call: Call, story: Story) -> None:
        """Takes a call from a caller."""
        if not self.up:
            self.world.end(story, "refused")
            return
        number = self.world.number()
        request = Waiting(
            id=str(number),
            tenant=call.tenant,
            base_model=BASE,
            revision_id=self.world.revision_of(call.adapter),
            rank=call.rank,
            prompt_tokens=call.prompt,
            priority=0,
            arrived=self.world.clock.time,
            weight=self.world.setup.weights.get(call.tenant, 1.0),
            mib=self.world.setup.model.mib(call.rank),
            prefix=tuple((call.adapter, name) for name in call.prefix),
            session=call.session,
        )
        held = self.open[request.id] = _Open(self, request, story)
        try:
            self.dispatch.offer(request)
        except LoraportError:
            held.end("refused")
            return
        if call.leaves_after:
            self.world.clock.later(call.leaves_after, held.leave)
        self.wake()

    def wake(self) -> None:
        """Lets requests go after everything that happens at this moment."""
        if not self._pumping:
            self._pumping = True
            self.world.clock.later(0.0, self._pump)

    def _pump(self) -> None:
        self._pumping = False
        while self.up and (grant := self.dispatch.next(self.world.clock.time)) is not None:
            held = self.open.get(grant.request.id)
            if held is None:
                grant.release()
            else:
                held.granted(grant)

    def sweep(self) -> None:
        """Does what time alone calls for."""
        if self.up:
            for request in self.dispatch.sweep(self.world.clock.time):
                held = self.open.get(request.id)
                if held is not None:
                    held.end("refused")
            self.wake()

    def poll(self) -> None:
        """Asks every executor for its state."""
        if not self.up:
            return
        for name, machine in self.world.machines.items():
            if machine.up and self.world.linked(self.name, name):
                if self.members.epoch(name) not in (0, machine.epoch):
                    self.dispatch.locality.lost(name)
                self.members.answered(name, machine.report(), machine.shape())
                self.dispatch.prices.observe(name, BASE, epoch=machine.epoch, totals=machine.totals())
                self.members.set_fault(name, "")
            else:
                self.members.set_fault(name, "does not answer")


class _Open:
    """One call at a router, until its one end."""

    def __init__(self, router: Router, request: Waiting, story: Story) -> None:
        self.router = router
        self.request = request
        self.story = story
        self.grant: Grant | None = None
        self.job: Job | None = None
        self.machine: Machine | None = None
        self.tries = 0

    def granted(self, grant: Grant) -> None:
        """Its turn has come."""
        world = self.router.world
        self.grant = grant
        self.story.admitted = world.clock.time if self.story.admitted is None else self.story.admitted
        self._send(grant.executor)

    def _send(self, executor: str) -> None:
        world = self.router.world
        self.tries += 1
        machine = world.machines[executor]
        if not machine.up or not world.linked(self.router.name, executor):
            self._failed("EXECUTOR_UNAVAILABLE", executor)
            return
        attempt = self.tries
        job = self.job = Job(
            id=self.request.id,
            call=self.story.call,
            revision=self.request.revision_id,
            on_begun=lambda load_ms, cached: self._begun(attempt, load_ms, cached),
            on_token=lambda: self._token(attempt),
            on_end=lambda: self._finished(attempt),
            on_failed=lambda why: self._broke(attempt, why, executor),
        )
        self.machine = machine
        world.started(self.story, self.router, job)
        machine.execute(job)

    def _begun(self, attempt: int, load_ms: float, cached: int) -> None:
        if attempt == self.tries and self.grant is not None:
            now = self.router.world.clock.time
            self.grant.begun(load_ms, cached, now=now)

    def _token(self, attempt: int) -> None:
        if attempt != self.tries or self.grant is None or self.job is None:
            return
        world = self.router.world
        if self.job.revision != world.promised(self.story):
            self.story.wrong += 1
        if self.story.first_token is None:
            self.story.first_token = world.clock.time
        self.story.tokens += 1
        self.grant.decoded(1, now=world.clock.time)

    def _finished(self, attempt: int) -> None:
        if attempt == self.tries:
            self.end("answered")

    def _broke(self, attempt: int, why: str, executor: str) -> None:
        if attempt == self.tries:
            self._failed(why, executor)

    def _failed(self, why: str, executor: str) -> None:
        """Once more, only before the first token and when the executor is gone."""
        router = self.router
        router.members.set_fault(executor, f"failed a request: {why}")
        if self.story.first_token is not None or self.tries > 1 or why not in RETRY or self.grant is None:
            self.end("failed")
            return
        now = router.world.clock.time
        if router.dispatch.move(self.grant, frozenset({executor}), now=now):
            self._send(self.grant.executor)
            return
        grant, self.grant = self.grant, None
        grant.uncharge()
        grant.release()
        self.request = replace(self.request, arrived=now)
        router.dispatch.offer(self.request)
        router.wake()

    def parted(self, executors: set[str]) -> None:
        """The connection to an executor broke: both sides give the request up."""
        if self.job is not None and self.machine is not None and self.machine.name in executors and not self.job.gone:
            self.machine.cancel(self.job)
            self.job.on_failed("EXECUTOR_UNAVAILABLE")

    def leave(self) -> None:
        """The caller goes away."""
        if self.request.id in self.router.open:
            self.end("left")

    def close(self) -> None:
        """Gives everything back."""
        self.tries += 1
        if self.job is not None and self.machine is not None:
            self.machine.cancel(self.job)
        self.router.queue.withdraw(self.request)
        if self.grant is not None:
            self.grant.release()
            self.grant = None

    def end(self, outcome: str) -> None:
        """The one end."""
        if self.router.open.pop(self.request.id, None) is not None:
            self.close()
            self.router.world.end(self.story, outcome)
            self.router.wake()


class World:
    """See the module's text."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = Clock()
        self.stories: list[Story] = []
        self.cuts: set[frozenset[str]] = set()
        self.board_up = True
        self.aliases: dict[str, str] = {}
        self._numbers = 0
        self._promised: dict[int, str] = {}
        self.machines = {
            f"e{index}": Machine(f"e{index}", setup.model, now=self.clock.now, later=self.clock.later)
            for index in range(setup.executors)
        }
        self.routers = [Router(f"r{index}", self) for index in range(setup.routers)]
        # Called once per sweep, for what a test watches.
        self.watch: Callable[[], None] = lambda: None
        for router in self.routers:
            router.poll()
        # The notice board's part for routers: who says so, when, and the work that it charged.
        self.board: dict[str, tuple[float, dict[str, float]]] = {}
        self._tick_poll()
        self._tick_sweep()
        self._tick_exchange()

    def cut(self, one: str, other: str) -> None:
        """Parts a router and an executor: what runs between them breaks for both."""
        self.cuts.add(frozenset((one, other)))
        for router in self.routers:
            if router.name in (one, other):
                for held in list(router.open.values()):
                    held.parted({one, other} - {router.name})

    def started_again(self, name: str) -> None:
        """A router that was started asks for the state of the fleet at once."""
        for router in self.routers:
            if router.name == name:
                router.poll()

    def number(self) -> int:
        """Returns a new request number."""
        self._numbers += 1
        return self._numbers

    def linked(self, one: str, other: str) -> bool:
        """Says whether two parts can reach each other."""
        return frozenset((one, other)) not in self.cuts

    def revision_of(self, adapter: str) -> str:
        """Returns the revision that an adapter's name means now."""
        return self.aliases.get(adapter, adapter)

    def promised(self, story: Story) -> str:
        """Returns the revision that a call was promised when it was first sent."""
        return self._promised[id(story)]

    def started(self, story: Story, router: Router, job: Job) -> None:
        """Notes what a call was sent for; a second attempt may not change it."""
        self._promised.setdefault(id(story), job.revision)

    def end(self, story: Story, outcome: str) -> None:
        """Notes an end."""
        story.ends += 1
        story.outcome = outcome
        story.ended = self.clock.time

    def add(self, calls: Iterable[Call]) -> None:
        """Plans calls; they go to the routers in turn."""
        for index, call in enumerate(calls):
            self.clock.later(call.at - self.clock.time, lambda call=call, index=index: self._call(call, index))  # type: ignore[misc]

    def _call(self, call: Call, index: int) -> None:
        story = Story(call, self.clock.time)
        self.stories.append(story)
        live = [router for router in self.routers if router.up]
        if not live:
            self.end(story, "refused")
            return
        live[index % len(live)].ask(call, story)

    def _tick_poll(self) -> None:
        for router in self.routers:
            router.poll()
        self.clock.later(POLL_S, self._tick_poll)

    def _tick_exchange(self) -> None:
        if self.board_up:
            now = self.clock.time
            for router in self.routers:
                if router.up:
                    self.board[router.shared.router] = (now, router.shared.say())
                    fresh = {name: work for name, (at, work) in self.board.items() if now - at < STALE_S}
                    router.shared.hear(fresh)
        else:
            self.board.clear()
        self.clock.later(EXCHANGE_S, self._tick_exchange)

    def _tick_sweep(self) -> None:
        for router in self.routers:
            router.sweep()
        self.watch()
        self.clock.later(SWEEP_S, self._tick_sweep)
