"""How many threads compute what on a CPU.

A thread that opens a parallel loop gets workers of its own, which stay until it ends. In a process with more of them
than cores, OpenMP (libgomp) lets none wait awake, whatever GOMP_SPINCOUNT says, and each of the 300 loops of a decode
step begins with waking somebody: a step of 32 rows took 165 ms instead of 149 once another thread had arranged an
adapter. So the device thread has workers, and all others compute alone or end. Small pieces of work stay on one thread
in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def compute_with(threads: int) -> None:
    """Let the calling thread compute with so many threads for as long as it lives, whatever others set meanwhile."""
    torch.get_num_threads()  # a thread takes the process's number when it first asks, over one that was set before
    torch.set_num_threads(threads)


def as_here(*work: Callable[[], None]) -> Callable[[], None]:
    """Return what does all of `work` in a new thread, which will compute with as many threads as the one that asks."""
    threads = torch.get_num_threads()

    def run() -> None:
        compute_with(threads)
        for part in work:
            part()

    return run


def on_one_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return work(...), computed by the calling thread alone. To change the number of threads takes 0.3 µs."""
    threads = torch.get_num_threads()
    if threads == 1:
        return work(*args, **kwargs)
    torch.set_num_threads(1)
    try:
        return work(*args, **kwargs)
    finally:
        torch.set_num_threads(threads)
