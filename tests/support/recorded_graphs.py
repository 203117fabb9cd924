"""A device that records work and plays it again as a GPU's graphs do: same operations, same tensors, no Python between.

Whatever the work computed on the host, or took from a tensor that was made while it ran, is frozen in the recording.
Asking a tensor for its value, which a capture forbids, fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from services.executor.kernels.triton_lora import TritonLora


class RecordedGraph:
    """Implements `Graph`."""

    def __init__(self) -> None:
        self.replays = 0
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        self.replays += 1
        for again in self.work:
            again()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("captured work asks for a value")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._graph.work.append(again)
        return out


@contextmanager
def recording(graph: RecordedGraph) -> Iterator[None]:
    """Record torch's operations and launches of the adapter kernels; both are also done."""
    launch = TritonLora.add

    def noted(lora: TritonLora, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        graph.work.append(lambda: launch(lora, group, layer, y, x))
        with _disable_current_modes():
            launch(lora, group, layer, y, x)

    with mock.patch.object(TritonLora, "add", noted), _Recorder(graph):
        yield


class RecordedGraphs:
    """Implements `GraphDevice`. Every capture takes `bytes_each`; launches of the adapter kernels are recorded too."""

    def __init__(self, bytes_each: int = 0) -> None:
        self.graphs: list[RecordedGraph] = []
        self._bytes_each = bytes_each

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[RecordedGraph, torch.Tensor]:
        work()
        graph = RecordedGraph()
        with recording(graph):
            result = work()
        self.graphs.append(graph)
        return graph, result

    def used_bytes(self) -> int:
        return len(self.graphs) * self._bytes_each
