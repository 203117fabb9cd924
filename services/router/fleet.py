"""Asks every executor for its state, reads the notice board, and keeps `members.py` up to date.

An executor serves while it answers. A refused connection takes it out at once, silence after a few polls; the next
good answer brings it back. That it takes no tickets is its own fault only once it has refused several tenants in a row.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Mapping

import structlog

from services.router.fleet_view import ExecutorView, FleetView
from services.router.members import Members
from services.router.ports import Executor, NoticeBoard
from services.router.prices import PriceBook
from services.shared.board import asked_to_end
from services.shared.clock import Clock
from services.shared.errors import LoraportError

log = structlog.get_logger()

STATE_TIMEOUT_S = 2.0
# An executor that is only busy may miss polls; one that refuses the connection is gone.
SILENT_POLLS = 3
# Whose tickets an executor refuses in a row, before it is taken out for everybody.
REFUSED_TENANTS = 2


class Fleet:
    """See the module's text. `base_id` returns the id that the catalog gives a base model, empty when unknown.

    `on_lost` is told of an executor that goes away: its name, its process's epoch, the revisions of its requests;
    `on_answered` of every answer to a poll: the name, the epoch, whether it says that it has FAILED.
    """

    def __init__(
        self,
        ports: Mapping[str, Executor],
        members: Members,
        *,
        board: NoticeBoard,
        base_id: Callable[[str], str],
        prices: PriceBook,
        interval_s: float,
        clock: Clock,
        on_restart: Callable[[str], None] = lambda name: None,
        on_lost: Callable[[str, int, Collection[str]], None] = lambda name, epoch, on_board: None,
        on_answered: Callable[[str, int, bool], None] = lambda name, epoch, failed: None,
    ) -> None:
        self.members = members
        self._ports = dict(ports)
        self._board = board
        self._base_id = base_id
        self._prices = prices
        self._interval_s = interval_s
        self._clock = clock
        self._on_restart = on_restart
        self._on_lost = on_lost
        self._on_answered = on_answered
        self._silent = dict.fromkeys(self._ports, 0)
        # How often each has gone away. And tenants whose tickets an executor has refused since it last took one.
        self._lost = dict.fromkeys(self._ports, 0)
        self._refused: dict[str, set[str]] = {name: set() for name in self._ports}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to poll, in the running event loop."""
        self._tasks = [asyncio.create_task(self._poll(name)) for name in self._ports]
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
        return self.members.view()

    def executor(self, name: str) -> Executor:
        """Returns the port of an executor. Raises KeyError."""
        return self._ports[name]

    def note_failure(self, name: str, why: str) -> None:
        """Takes an executor out until it answers a poll."""
        self._set_fault(name, f"failed a request: {why}", lost=why == "EXECUTOR_UNAVAILABLE")

    def note_ticket(self, name: str, tenant: str, *, taken: bool) -> None:
        """Takes an executor out until it answers a poll if it takes nobody's tickets. One tenant is no evidence."""
        refused = self._refused[name]
        if taken:
            refused.clear()
            return
        refused.add(tenant)
        if len(refused) >= REFUSED_TENANTS:
            refused.clear()
            self.note_failure(name, "INVALID_TICKET")

    @property
    def answering(self) -> bool:
        """Whether any executor answered its last poll: if none did, it is this router that is cut off."""
        return not all(self._silent.values())

    def set_drained(self, name: str, drained: bool) -> ExecutorView:
        """Stops or resumes sending to an executor.

        Raises:
            LoraportError: EXECUTOR_NOT_FOUND.
        """
        if name not in self._ports:
            raise LoraportError("EXECUTOR_NOT_FOUND")
        self.members.set_drained(name, drained)
        log.info("executor drained" if drained else "executor back in service", executor=name)
        return self.members.executor(name)

    async def poll_once(self, name: str) -> None:
        """Asks one executor for its state."""
        lost = self._lost[name]
        try:
            state = await self._ports[name].state(STATE_TIMEOUT_S)
        except LoraportError as error:
            self._silent[name] += 1
            if error.reason != "DEADLINE_EXCEEDED" or self._silent[name] >= SILENT_POLLS:
                self._set_fault(name, "does not answer", lost=True)
            return
        self._silent[name] = 0
        if self.members.epoch(name) not in (0, state.report.epoch):
            self._on_restart(name)
        report = dataclasses.replace(state.report, executor=name, time_ms=int(self._clock.now() * 1000))
        base_model = self.members.base_model(name)
        self.members.answered(name, report, state.shape)
        self._prices.observe(name, base_model, epoch=report.epoch, totals=state.totals)
        expected = self._base_id(base_model)
        if state.state != "SERVING":
            self._set_fault(name, f"is {state.state}", lost=state.state == "FAILED")
        elif state.base_id != expected:
            self._set_fault(name, "serves another base model" if expected else "its base model is not registered")
        else:
            self._set_fault(name, "")
        if lost == self._lost[name]:  # else it may have answered before it went away
            self._on_answered(name, report.epoch, state.state == "FAILED")

    def _set_fault(self, name: str, fault: str, *, lost: bool = False) -> None:
        """`lost`: it did not end as it was asked to. What it worked for is in the books still."""
        if fault and lost and not self.members.fault(name):
            self._lost[name] += 1
            self._on_lost(name, self.members.epoch(name), self.members.executor(name).expected)
        if self.members.set_fault(name, fault):
            log.warning("executor out", executor=name, why=fault) if fault else log.info("executor in", executor=name)

    async def _poll(self, name: str) -> None:
        while True:
            await self.poll_once(name)
            # While it is out, ask more often: coming back is what callers wait for.
            await asyncio.sleep(self._interval_s if not self.members.fault(name) else min(0.25, self._interval_s))

    async def _read_board(self) -> None:
        while not asked_to_end():
            for name, notice in (await self._board.get(tuple(self._ports))).items():
                self.members.heard(name, notice)
            if not asked_to_end():
                await asyncio.sleep(self._interval_s)
