"""Faults of one revision on a real executor, for tests: too slow, wrongly scaled on the device, failing, deadly, or kept
from being loaded or probed for as long as the fault is there.

`install` patches the executor's classes in its own process. A JSON file maps revision ids to the word of a fault; it is
read at every use, so a test may give and take faults while the executor runs. `word@NAME` is a fault of the executor
whose configuration has that name.
"""

import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from services.executor.engine.staging import Staged, Stager
from services.executor.intake import HostAdapter
from services.executor.servicer import ExecutorServicer

DELAY_S = 0.05


def install(file: str) -> None:
    """Makes the executor of this process faulty."""
    path = Path(file)
    name = Path(sys.orig_argv[-1]).stem

    def fault(revision_id: str) -> str:
        try:
            word, _, where = str(json.loads(path.read_text()).get(revision_id, "")).partition("@")
        except (OSError, ValueError):
            return ""
        return word if where in ("", name) else ""

    stage, answer, probe = Stager.__call__, ExecutorServicer._answer, ExecutorServicer.Probe

    async def faulty_probe(self: ExecutorServicer, request: Any, context: Any) -> Any:
        while fault(request.revision_id) == "no-probe":
            await asyncio.sleep(DELAY_S)
        return await probe(self, request, context)

    def faulty_stage(self: Stager, adapter: HostAdapter) -> Staged:
        while fault(adapter.revision_id) == "no-load":  # in a thread
            time.sleep(DELAY_S)
        if fault(adapter.revision_id) == "scale":
            wrong = {path: dataclasses.replace(m, scaling=m.scaling * 1.5) for path, m in adapter.modules.items()}
            adapter = dataclasses.replace(adapter, modules=wrong)
        return stage(self, adapter)

    async def faulty_answer(
        self: ExecutorServicer, execution: Any, revision_id: str, load_ms: float
    ) -> AsyncGenerator[Any, None]:
        kind = fault(revision_id) if revision_id else ""
        async for events in answer(self, execution, revision_id, load_ms):
            if kind == "slow":
                await asyncio.sleep(DELAY_S)
            tokens = any(event.WhichOneof("event") == "tokens" for event in events)
            if kind == "kill" and tokens:
                os.kill(os.getpid(), signal.SIGKILL)
            yield events
            if kind == "crash" and tokens:
                raise RuntimeError("the revision makes this executor's code fail")

    Stager.__call__ = faulty_stage  # type: ignore[method-assign]
    ExecutorServicer._answer = faulty_answer  # type: ignore[method-assign]
    ExecutorServicer.Probe = faulty_probe  # type: ignore[method-assign]
