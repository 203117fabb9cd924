"""The router's outside world. Only `LoraportError` crosses these ports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.router.events import ExecutorEvent, ExecutorScored, Order, ScoreOrder
from services.router.members import Shape
from services.router.prices import StepTotals
from services.shared.catalog import CatalogView
from services.shared.residency import Notice


class Catalog(Protocol):
    """The registry's catalog as far as it is known here."""

    @property
    def view(self) -> CatalogView:
        """The view; incomplete until it is synced."""

    async def catch_up(self) -> bool:
        """Makes the view as new as the registry is now; False when that took too long."""


@dataclass(frozen=True, slots=True)
class ExecutorState:
    """An executor's own word. `state` is SERVING, DRAINING or FAILED; `totals` is what it has computed."""

    base_id: str
    state: str
    shape: Shape
    report: Notice
    totals: StepTotals


class Execution(Protocol):
    """One request on an executor."""

    async def next(self) -> Sequence[ExecutorEvent]:
        """Returns what the executor says next, nothing at the end. Raises LoraportError."""

    def cancel(self) -> None:
        """Ends the request; harmless when it has ended."""

    def leave(self) -> None:
        """Takes no more interest: the executor has told everything, and ends the request in a moment or is made to."""


class Executor(Protocol):
    """One executor."""

    async def state(self, timeout_s: float) -> ExecutorState:
        """Asks for its state. Raises LoraportError: EXECUTOR_UNAVAILABLE, DEADLINE_EXCEEDED."""

    def execute(self, order: Order, *, timeout_s: float) -> Execution:
        """Sends a request. Raises LoraportError: PROMPT_TOO_LONG, it fits no message."""

    async def score(self, order: ScoreOrder, *, timeout_s: float) -> ExecutorScored:
        """Asks for a score; cancelling the caller cancels it. Raises LoraportError."""

    async def preload(self, ticket: bytes, revision_id: str, *, timeout_s: float) -> str:
        """Brings a revision there and has it kept for a rollout; returns the id of what is there. Raises
        LoraportError."""


class NoticeBoard(Protocol):
    """The board that executors report to; an absent board is an empty one."""

    async def get(self, executors: Sequence[str]) -> dict[str, Notice]:
        """Returns the notices that are there."""
