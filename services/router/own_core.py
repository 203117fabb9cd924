"""A core of its own, for a router that was given one."""

import os
from contextlib import suppress


def use_own_core() -> bool:
    """Lets the threads of this process wake one another less eagerly (SCHED_BATCH) if it may run on one core only, of
    a machine that has more: whoever pinned it there gave it that core. Call it before other threads begin; returns
    whether it was done.

    Where gRPC's threads take the core from the event loop at every event, and it from them, streams cost a ninth more
    (docs/adr/0025-one-stream-to-an-executor.md). On a core that others use, a router would wait for them.
    """
    if not hasattr(os, "sched_setscheduler") or len(os.sched_getaffinity(0)) > 1 or os.cpu_count() == 1:
        return False
    with suppress(OSError):  # without it it is slower, and right
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return True
    return False
