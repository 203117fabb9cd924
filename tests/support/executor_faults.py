"""Faults of one revision on a real executor, for tests: too slow, wrongly scaled on the device, failing, deadly.

`install` patches the executor's classes in its own process. A JSON file maps revision ids to the word of a fault; it is
read at every use, so a test may give and take faults while the executor runs.
"""

import asyncio
import dataclasses
import json
import os
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

    def fault(revision_id: str) -> str:
        try:
            return str(json.loads(path.read_text()).get(revision_id, ""))
        except (OSError, ValueError):
            return ""

    stage, answer = Stager.__call__, ExecutorServicer._answer

    def faulty_stage(self: Stager, adapter: HostAdapter) -> Staged:
        if fault(adapter.revision_id) == "scale":
            wrong = {path: dataclasses.replace(m, scaling=m.scaling * 1.5) for path, m in adapter.modules.items()}
            adapter = dataclasses.replace(adapter, modules=wrong)
        return stage(self, adapter)

    async def faulty_answer(
        self: ExecutorServicer, execution: Any, revision_id: str, load_ms: float
    ) -> AsyncGenerator[Any, None]:
        kind = fault(revision_id) if revision_id else ""
        async for response in answer(self, execution, revision_id, load_ms):
            if kind == "slow":
                await asyncio.sleep(DELAY_S)
            yield response
            if kind == "crash" and response.WhichOneof("event") == "tokens":
                raise RuntimeError("the revision makes this executor's code fail")
            if kind == "kill" and response.WhichOneof("event") == "tokens":
                os._exit(9)

    Stager.__call__ = faulty_stage  # type: ignore[method-assign]
    ExecutorServicer._answer = faulty_answer  # type: ignore[method-assign]
