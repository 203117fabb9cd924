"""Runs plans on a device that may fail.

A step that fails is run again row by row, so that what one row does to it ends that row alone. A device on which
nothing works any more is given up: an executor that failed everything at once would look idle, and draw requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.executor.engine.runner import Runner
from services.executor.plan import Plan, Row, RowResult, StepResult
from services.executor.request import FinishReason

# Steps without one good row, one after another, after which the device is given up.
MAX_FAULTS = 3


class DeviceLost(Exception):
    """Nothing works on the device any more."""


class Steps:
    """Device thread only."""

    def __init__(self, runner: Runner, *, on_fault: Callable[[BaseException], None]) -> None:
        self._runner = runner
        self._on_fault = on_fault
        self._faults = 0

    def run(self, plan: Plan) -> tuple[StepResult, bool]:
        """Return what came of the plan, and whether it ran as a whole. A row that failed has failure ENGINE_FAULT.

        Raises:
            DeviceLost: so many steps failed in a row.
        """
        try:
            result = self._runner.run(plan)
        except Exception as error:
            self._on_fault(error)
            result = self._run_apart(plan)
            dead = all(row.failure is FinishReason.ENGINE_FAULT for row in result.rows)
            self._faults = self._faults + 1 if dead else 0
            if self._faults >= MAX_FAULTS:
                raise DeviceLost(f"{MAX_FAULTS} steps failed, one after another") from error
            return result, False
        self._faults = 0
        return result, True

    def _run_apart(self, plan: Plan) -> StepResult:
        """Run every row alone. A row writes to its own blocks only, and writes the same when it runs again."""
        results: list[RowResult] = []
        path = ""
        for row in plan.rows:
            alone = self._run_alone(plan, row) if len(plan.rows) > 1 else None
            if alone is None:
                results.append(RowResult(request_id=row.request_id, failure=FinishReason.ENGINE_FAULT))
            else:
                results += alone.rows
                path = alone.kernel_path
        return StepResult(step=plan.step, rows=tuple(results), kernel_path=path)

    def _run_alone(self, plan: Plan, row: Row) -> StepResult | None:
        own = set(row.blocks)
        fresh = tuple(block for block in plan.fresh_blocks if block in own)
        try:
            return self._runner.run(replace(plan, rows=(row,), fresh_blocks=fresh))
        except Exception:  # Told once for the step.
            return None
