"""What became of a future, of asyncio's or of a thread's: asked without raising, whatever state it is in. Pure."""

from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Future(Protocol[T_co]):
    """What both kinds of future have."""

    def done(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def result(self) -> T_co: ...

    def exception(self) -> BaseException | None: ...


def result_of(future: Future[T]) -> T | None:
    """Returns what a future was given; None while it waits, and when it failed or was cancelled."""
    given = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if given else None


def fault_of(future: Future[Any]) -> BaseException | None:
    """Returns what an ended future failed of, which counts as looked at; None when it did not, or was cancelled."""
    return None if future.cancelled() else future.exception()
