"""An executor as the simulator knows it: the real adapter pool and eviction, and a linear model of everything else.

A step takes  t0 + prefill * prompt tokens + row * decode rows + context * tokens read + adapter * distinct MiB  (ms);
rows that decode go first, those in prefill share the rest of its tokens as the executor's own do. Loads come over
one serial link, latency + MiB / bandwidth each, at most two of them reserved at a time. Key/value blocks of finished
prompts are kept, least recently used first to go.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.sim.workloads import Call
from services.executor.adapter_pool import AdapterPool, Berth
from services.executor.eviction import make_policy
from services.executor.prefill import PrefillShares, Prompt, PromptPace, count_waiting
from services.router.members import Shape
from services.router.prices import StepTotals
from services.shared.residency import Notice, Resident

PREFIX_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Times in ms, sizes in MiB. A page holds 8 rank rows of `page_mib` together. The defaults are an 8B decoder in
    bfloat16 on 2 TB/s and 300 TFLOP/s: 16 GB of weights a step, 16 GFLOP a token, 128 KiB of keys and values a token.
    """

    step: float = 8.0
    prefill: float = 0.05
    row: float = 0.1
    context: float = 0.000065
    adapter: float = 0.0005
    link_ms: float = 20.0
    link_mib_ms: float = 1.0
    page_mib: float = 20.0
    pages: int = 32
    max_rows: int = 64
    # Of a step without rows that generate; beside those, prompts take what the executor gives them.
    step_tokens: int = 4096
    max_loads: int = 2
    kv_blocks: int = 400
    eviction: str = "gdsf-d"

    def load_ms(self, rank: int) -> float:
        """Returns what the link needs for one adapter."""
        return self.link_ms + self.link_mib_ms * self.mib(rank)

    def mib(self, rank: int) -> float:
        """Returns an adapter's size."""
        return self.page_mib * -(-rank // 8)


@dataclass(slots=True, eq=False)
class Job:
    """One request here. `revision` is what it was sent for; the callbacks are its caller's."""

    id: str
    call: Call
    revision: str
    on_begun: Callable[[float, int], None]
    on_token: Callable[[], None]
    on_end: Callable[[], None]
    on_failed: Callable[[str], None]
    sent: float = 0.0
    prompt_left: int = 0
    cached: int = 0
    made: int = 0
    lease: int | None = None
    load_ms: float = 0.0
    gone: bool = False


@dataclass(slots=True)
class _Load:
    rank: int
    tenant: str
    asked: float
    reserved: bool = False
    waiters: list[Job] = field(default_factory=list)


class Machine:
    """See the module's text. `later(seconds, function)` is the simulator's clock; `ended` counts finished jobs."""

    def __init__(
        self, name: str, model: Model, *, now: Callable[[], float], later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self.name = name
        self.model = model
        self._now = now
        self._later = later
        self.epoch = 0
        self.loads_done: dict[str, int] = {}
        # Told the revision of every request that comes, for what a test watches.
        self.on_execute: Callable[[str], None] = lambda revision: None
        self.load_ms_done = 0.0
        self.up = False
        self.start()

    def start(self) -> None:
        """Starts a process with nothing on the device."""
        model = self.model
        self.epoch += 1
        self.up = True
        self.pool = AdapterPool(
            model.pages, page_rows=8, page_bytes=int(model.page_mib * 2**20), policy=make_policy(model.eviction)
        )
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        self._link: deque[str] = deque()
        self._busy_link = False
        self._waiting: deque[Job] = deque()
        self._rows: list[Job] = []
        self._stepping = False
        self._kv: OrderedDict[object, None] = OrderedDict()
        self._totals = StepTotals()
        self._prefill = PrefillShares()
        self._pace = PromptPace()

    def kill(self) -> None:
        """Ends the process; its callers' connections break."""
        jobs = [*self._rows, *self._waiting, *(job for load in self._loads.values() for job in load.waiters)]
        self.up = False
        self.epoch_of_death = self.epoch
        self._rows, self._waiting, self._loads = [], deque(), OrderedDict()
        for job in jobs:
            if not job.gone:
                job.gone = True
                job.on_failed("EXECUTOR_UNAVAILABLE")

    def execute(self, job: Job) -> None:
        """Takes a request."""
        job.sent = self._now()
        self.on_execute(job.revision)
        job.prompt_left = job.call.prompt
        if not job.revision:
            self._enter(job)
            return
        lease = self.pool.lease(job.revision, now=self._now())
        if lease is not None:
            job.lease = lease
            self._enter(job)
            return
        load = self._loads.get(job.revision)
        if load is None:
            load = self._loads[job.revision] = _Load(job.call.rank, job.call.tenant, self._now())
        load.waiters.append(job)
        self._reserve()

    def cancel(self, job: Job) -> None:
        """Ends a request whose caller left."""
        if job.gone:
            return
        job.gone = True
        load = self._loads.get(job.revision)
        if load is not None and job in load.waiters:
            load.waiters.remove(job)
            if not load.waiters and not load.reserved:
                del self._loads[job.revision]
        self._drop(job)

    def report(self) -> Notice:
        """Returns what an executor says that it holds."""
        residents = self.pool.residents()
        return Notice(
            executor=self.name,
            base_id="base",
            epoch=self.epoch,
            sequence=self.pool.changes,
            time_ms=int(self._now() * 1000),
            queued_count=len(self._waiting),
            running_count=len(self._rows),
            pool_used_bytes=sum(r.size_bytes for r in residents),
            pool_size_bytes=self.pool.page_count * self.pool.page_bytes,
            revisions=tuple(Resident(r.revision_id, r.state.name, r.size_bytes, r.leases) for r in residents),
        )

    def totals(self) -> StepTotals:
        """Returns what it has computed."""
        return self._totals

    def shape(self) -> Shape:
        """Returns its sizes."""
        return Shape(min(256, self.pool.page_count * 8), 131_072, 8, self.pool.page_bytes)

    # --- loads

    def _reserve(self) -> None:
        reserved = sum(load.reserved for load in self._loads.values())
        for key, load in list(self._loads.items()):
            if reserved >= self.model.max_loads:
                return
            if load.reserved or self.pool.state(key) is Berth.DRAINING:
                continue
            if self.pool.reserve(key, rank=load.rank, tenant=load.tenant) is None:
                self.pool.scrubbed(self.pool.take_dirty())
                if self.pool.reserve(key, rank=load.rank, tenant=load.tenant) is None:
                    continue
            load.reserved = True
            reserved += 1
            self._link.append(key)
            self._transfer()

    def _transfer(self) -> None:
        if self._busy_link or not self._link:
            return
        key = self._link.popleft()
        took, epoch = self.model.load_ms(self._loads[key].rank), self.epoch
        self._busy_link = True

        def done() -> None:
            if self.epoch != epoch or not self.up:
                return
            self._busy_link = False
            self._arrived(key, took)
            self._transfer()
            self._reserve()

        self._later(took / 1000, done)

    def _arrived(self, key: str, took: float) -> None:
        load = self._loads.pop(key)
        self.loads_done[key] = self.loads_done.get(key, 0) + 1
        self.load_ms_done += took
        self.pool.ready(key, now=self._now(), load_ms=took)
        for job in load.waiters:
            job.lease = self.pool.lease(key, now=self._now())
            job.load_ms = (self._now() - job.sent) * 1000
            self._enter(job)

    # --- steps

    def _enter(self, job: Job) -> None:
        self._waiting.append(job)
        if not self._stepping:
            self._step()

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self.model.max_rows:
            job = self._waiting.popleft()
            if job.gone:
                continue
            job.cached = min(self._cached(job), job.call.prompt - 1)
            job.prompt_left = job.call.prompt - job.cached
            self._rows.append(job)
            job.on_begun(job.load_ms, job.cached)

    def _step(self) -> None:
        self._admit()
        if not self._rows:
            self._stepping = False
            return
        self._stepping = True
        decode = [job for job in self._rows if not job.prompt_left]
        asking = [job for job in self._rows if job.prompt_left]
        # Whoever could join has a row by now; the others would not have one of a longer step.
        waiting = count_waiting([job.call.tenant for job in asking], [job.call.tenant for job in decode])
        shares = self._shares(asking, self._pace.beside(len(decode), self.model.step_tokens, waiting=waiting))
        prefill = sum(shares.values())
        context = sum(job.call.prompt + job.made for job in decode)
        revisions = {job.revision: self.model.mib(job.call.rank) for job in self._rows if job.revision}
        mib = sum(revisions.values())
        model = self.model
        took = (
            model.step
            + model.prefill * prefill
            + model.row * len(decode)
            + model.context * context
            + model.adapter * mib
        )
        self._pace.note(decoding=len(decode), prompt_tokens=prefill, took_s=took / 1000)
        was, epoch = self._totals, self.epoch
        self._totals = StepTotals(
            steps=was.steps + 1,
            busy_ms=was.busy_ms + took,
            prefill_tokens=was.prefill_tokens + prefill,
            decode_rows=was.decode_rows + len(decode),
            context_tokens=was.context_tokens + context,
            adapter_mib=was.adapter_mib + mib,
        )
        self._later(took / 1000, lambda: self._commit(decode, shares, epoch))

    def _shares(self, prefilling: list[Job], budget: int) -> dict[Job, int]:
        prompts = [Prompt(job.call.tenant, job.prompt_left) for job in prefilling]
        return dict(zip(prefilling, self._prefill.divide(prompts, budget, now=self._now()), strict=True))

    def _commit(self, decode: list[Job], shares: dict[Job, int], epoch: int) -> None:
        if self.epoch != epoch or not self.up:
            return
        for job, tokens in shares.items():
            job.prompt_left -= tokens
        for job in [*decode, *(job for job in shares if not job.prompt_left)]:
            if job.gone:
                continue
            job.made += 1
            job.on_token()
            if job.made >= job.call.output and not job.gone:
                job.gone = True
                self._keep(job)
                self._drop(job)
                job.on_end()
        self._reserve()
        self._step()

    def _drop(self, job: Job) -> None:
        if job in self._rows:
            self._rows.remove(job)
        if job.lease is not None:
            lease, job.lease = job.lease, None
            self.pool.release(lease)
            self._reserve()

    # --- keys and values

    def _cached(self, job: Job) -> int:
        count = 0
        for name in job.call.prefix:
            if (job.revision, name) not in self._kv:
                break
            self._kv.move_to_end((job.revision, name))
            count += PREFIX_TOKENS
        return count

    def _keep(self, job: Job) -> None:
        for name in job.call.prefix[: job.call.prompt // PREFIX_TOKENS]:
            self._kv[(job.revision, name)] = None
            self._kv.move_to_end((job.revision, name))
        while len(self._kv) > self.model.kv_blocks:
            self._kv.popitem(last=False)
