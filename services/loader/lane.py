"""Threads for one kind of blocking work, so that it holds up no other kind."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """At most `threads` pieces of work at a time; more wait, in order."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Begins the work in the running event loop, in the caller's context; await it. Who stops waiting does not end
        it."""
        context = contextvars.copy_context()
        work = partial(context.run, function, *args, **kwargs)
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Takes no further work."""
        self._pool.shutdown(wait=False, cancel_futures=True)
