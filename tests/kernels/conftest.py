"""Fixtures of the tests that run Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton loads more of itself at the first launch, and must find the mode that it was imported in."""
    from tests.kernels.triton_rig import overflow_checks, quicker_interpreter

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with overflow_checks(False), quicker_interpreter():
        yield
    torch.set_num_threads(threads)
