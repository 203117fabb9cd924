"""Records a device's work once and plays it again: CUDA graphs behind a small port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again: the same kernels on the same addresses, with whatever lies there now."""


class GraphDevice(Protocol):
    """Records work."""

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Run `work` once to warm up, then record it; return the recording and where it leaves its result."""

    def used_bytes(self) -> int:
        """Return how much of the device's memory is in use, by whatever."""


class CudaGraphs:
    """Implements `GraphDevice`. All graphs share one memory pool: only one of them is replayed at a time, and what it
    leaves is used before the next one is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """See `GraphDevice`. Other threads may use the device meanwhile."""
        steps, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(steps)
        with torch.cuda.stream(side):
            work()
        steps.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        self._pool = graph.pool()
        return graph, result

    def used_bytes(self) -> int:
        """See `GraphDevice`."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free
