"""What is known of every executor: polled state, notices from the board, and this router's own requests there.

An executor serves while it answers. A refused connection takes it out at once, silence after a few polls; the next
good answer brings it back.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import structlog

from services.router.fleet_view import ExecutorView, FleetView, newer
from services.router.ports import Executor, ExecutorState, NoticeBoard
from services.shared.clock import Clock
from services.shared.errors import LoraportError
from services.shared.residency import Notice

log = structlog.get_logger()

STATE_TIMEOUT_S = 2.0
# An executor that is only busy may miss polls; one that refuses the connection is gone.
SILENT_POLLS = 3
UNKNOWN, DRAINED = "has not answered yet", "is drained by an admin"


@dataclasses.dataclass(slots=True)
class _Member:
    """One executor. `fault` is empty while it serves."""

    base_model: str
    port: Executor
    fault: str = UNKNOWN
    drained: bool = False
    silent_polls: int = 0
    state: ExecutorState | None = None
    report: Notice | None = None
    in_flight: Counter[str] = dataclasses.field(default_factory=Counter)


class Flight:
    """One request of this router on one executor, counted until it is released."""

    def __init__(self, executor: str, release: Callable[[], None]) -> None:
        self.executor = executor
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Ends the count; once is enough."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Fleet:
    """See the module's text. `base_id` returns the id that the catalog gives a base model, empty when unknown."""

    def __init__(
        self,
        executors: Mapping[str, tuple[str, Executor]],
        *,
        board: NoticeBoard,
        base_id: Callable[[str], str],
        window: int,
        interval_s: float,
        clock: Clock,
    ) -> None:
        self._members = {name: _Member(base, port) for name, (base, port) in sorted(executors.items())}
        self._board = board
        self._base_id = base_id
        self._window = window
        self._interval_s = interval_s
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        # Called after every change that may let a request go.
        self.on_change: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begins to poll, in the running event loop."""
        self._tasks = [asyncio.create_task(self._poll(name)) for name in self._members]
        self._tasks.append(asyncio.create_task(self._read_board()))

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs in the background; it ends by `stop` or by a bug."""
        return tuple(self._tasks)

    async def stop(self) -> None:
        """Stops polling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def view(self) -> FleetView:
        """Returns the fleet as it is now."""
        return FleetView(tuple(self._view(name, member) for name, member in self._members.items()))

    def executor(self, name: str) -> Executor:
        """Returns the port of an executor. Raises KeyError."""
        return self._members[name].port

    def begin(self, name: str, revision_id: str, *, answers: int = 1) -> Flight:
        """Counts a request that is sent to an executor now, by its answers: each is a row of the batch there."""
        flights = self._members[name].in_flight
        flights[revision_id] += answers

        def release() -> None:
            flights[revision_id] -= answers
            if not flights[revision_id]:
                del flights[revision_id]
            self.on_change()

        return Flight(name, release)

    def note_failure(self, name: str, why: str) -> None:
        """Takes an executor out until it answers a poll."""
        self._set_fault(name, f"failed a request: {why}")

    def set_drained(self, name: str, drained: bool) -> ExecutorView:
        """Stops or resumes sending to an executor.

        Raises:
            LoraportError: EXECUTOR_NOT_FOUND.
        """
        member = self._members.get(name)
        if member is None:
            raise LoraportError("EXECUTOR_NOT_FOUND")
        member.drained = drained
        log.info("executor drained" if drained else "executor back in service", executor=name)
        self.on_change()
        return self._view(name, member)

    async def poll_once(self, name: str) -> None:
        """Asks one executor for its state."""
        member = self._members[name]
        try:
            state = await member.port.state(STATE_TIMEOUT_S)
        except LoraportError as error:
            member.silent_polls += 1
            if error.reason != "DEADLINE_EXCEEDED" or member.silent_polls >= SILENT_POLLS:
                self._set_fault(name, "does not answer")
            return
        member.silent_polls = 0
        member.state = state
        # The executor's own answer counts, also when a new process counts epochs from a lower number.
        member.report = dataclasses.replace(state.report, executor=name, time_ms=int(self._clock.now() * 1000))
        expected = self._base_id(member.base_model)
        if state.state != "SERVING":
            self._set_fault(name, f"is {state.state}")
        elif state.base_id != expected:
            self._set_fault(name, "serves another base model" if expected else "its base model is not registered")
        else:
            self._set_fault(name, "")

    def _view(self, name: str, member: _Member) -> ExecutorView:
        report, state = member.report, member.state
        return ExecutorView(
            name=name,
            base_model=member.base_model,
            serving=not member.fault and not member.drained,
            why_not=DRAINED if member.drained else member.fault,
            in_flight=member.in_flight.total(),
            window=self._window,
            resident=MappingProxyType({r.revision_id: r for r in report.revisions} if report else {}),
            expected=frozenset(member.in_flight),
            max_rank=state.max_rank if state else 0,
            max_context=state.max_context if state else 0,
            report=report,
        )

    def _set_fault(self, name: str, fault: str) -> None:
        member = self._members[name]
        if fault != member.fault:
            log.warning("executor out", executor=name, why=fault) if fault else log.info("executor in", executor=name)
        member.fault = fault
        self.on_change()

    async def _poll(self, name: str) -> None:
        while True:
            await self.poll_once(name)
            # While it is out, ask more often: coming back is what callers wait for.
            await asyncio.sleep(self._interval_s if not self._members[name].fault else min(0.25, self._interval_s))

    async def _read_board(self) -> None:
        while True:
            for name, notice in (await self._board.get(tuple(self._members))).items():
                member = self._members[name]
                member.report = newer(member.report, notice)
            await asyncio.sleep(self._interval_s)
