"""What computed the adapters is said of every step, in words that a metric's label knows."""

from __future__ import annotations

import pytest

from services.executor.config import ModelOptions
from services.executor.kernels.dispatch import all_paths
from services.executor.plan import Plan, StepResult
from services.executor.step_meter import StepMeter
from services.shared import metrics


def test_every_path_is_a_value_of_the_metrics_label() -> None:
    assert metrics.KERNEL_STEPS.labels["path"] == all_paths()


def test_a_step_is_noted_with_its_path() -> None:
    meter = StepMeter()
    plan, result = Plan(step=1, rows=(), fresh_blocks=()), StepResult(step=1, rows=(), kernel_path="merged")
    meter.note(plan, result, took_s=0.1, adapter_bytes=len)
    assert [note.kernel_path for note in meter.take()] == ["merged"]


def test_a_gpu_is_asked_for_by_the_configuration() -> None:
    assert ModelOptions().device == "cpu"
    with pytest.raises(ValueError, match="graph_seconds"):
        ModelOptions(device="cuda", graph_seconds=-1.0)
