"""Small pieces of work stay on the calling thread: to wake another one costs tens of microseconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


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
