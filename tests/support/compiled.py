"""The compiled step for tests, or a reason why there is none here."""

from __future__ import annotations

import pytest

from services.executor.kernels.compiled import CompilerMissing, load_step
from services.executor.kernels.cpu_step import CpuStep


def compiled_step() -> CpuStep:
    """Return the step; skips the test where it cannot be built."""
    try:
        step = load_step("on")
    except CompilerMissing as error:
        pytest.skip(f"no compiled step: {error}")
    assert step is not None
    return step
