"""A GPU step's adapters as a decoder takes them: the kernels for the linears, plain torch for token embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from services.executor.model.lora_linear import EmbeddingAdapter


class KernelStep(Protocol):
    """A step on the kernels: `TritonStep`, or `ReferenceStep` where there is no Triton."""

    @property
    def path(self) -> str: ...

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class KernelBatch:
    """Implements `interface.Adapters`. Groups that are not `touched` are not launched; None launches all."""

    step: KernelStep
    touched: frozenset[str] | None
    embeddings: tuple[tuple[slice, EmbeddingAdapter], ...] = ()

    @property
    def path(self) -> str:
        return self.step.path

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """See `Adapters.add`. y and x have the dtype of the pages."""
        if self.touched is None or group in self.touched:
            self.step.add(group, layer, y, x)

    def add_embedding(self, y: torch.Tensor, tokens: torch.Tensor, *, gain: float = 1.0) -> None:
        """See `Adapters.add_embedding`."""
        for rows, adapter in self.embeddings:
            adapter.add(y[rows], tokens[rows], gain)
