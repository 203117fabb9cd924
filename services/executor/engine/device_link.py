"""How an adapter's bytes get from the host into the device's pages, beside the steps that run.

The steps' stream computes; a link copies. On a GPU the copies have a stream of their own, and three orders matter:
what is erased is erased before it is written (`after_steps`), a revision is used only when its bytes have landed
(`mark`), and pages that a stopped load still writes to are erased after that (`before_steps`). How much is copied
between two steps is the caller's bound (`Loads.advance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Landing(Protocol):
    """A place in the order of a link's copies."""

    def query(self) -> bool:
        """Say whether everything before it has been copied. Does not wait."""


class DeviceLink(Protocol):
    """Copies from host memory to the pool. Owned by the device thread."""

    pinned: bool
    """Whether host arrays should lie in memory from which the device copies by itself."""

    piece_bytes: int
    """The most that one `put` should copy."""

    def index(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return pool rows as an index for `put`."""

    def put(self, target: torch.Tensor, rows: torch.Tensor, source: torch.Tensor) -> None:
        """Copy source [layers, n, ...] to the rows `rows` of target [layers, pool rows, ...]. May return before it is
        done; `source` may be forgotten all the same."""

    def after_steps(self) -> None:
        """Let what is copied from now on come after everything that the steps' stream was given so far."""

    def before_steps(self) -> None:
        """Let what the steps' stream is given from now on come after everything that was copied so far."""

    def mark(self) -> Landing:
        """Return the place after everything that was copied so far."""


class _Landed:
    def query(self) -> bool:
        return True


class CpuLink:
    """Copies at once: host and device are one memory."""

    pinned = False
    # An output head's rows of rank 256 are 50 MB on a vocabulary of 49,000: too much between two steps.
    piece_bytes = 1 << 20

    def index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers)

    def put(self, target: torch.Tensor, rows: torch.Tensor, source: torch.Tensor) -> None:
        for layer, part in zip(target, source, strict=True):
            layer.index_copy_(0, rows, part)

    def after_steps(self) -> None:
        pass

    def before_steps(self) -> None:
        pass

    def mark(self) -> Landing:
        return _Landed()


class CudaLink:
    """Copies from pinned memory on a stream of its own. torch keeps pinned memory until its copies have run."""

    pinned = True
    piece_bytes = 8 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def index(self, numbers: Sequence[int]) -> torch.Tensor:
        host = torch.tensor(numbers, pin_memory=True)
        with torch.cuda.stream(self._side):
            return host.to(self._device, non_blocking=True)

    def put(self, target: torch.Tensor, rows: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            target.index_copy_(1, rows, source.to(self._device, non_blocking=True))

    def after_steps(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def before_steps(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def mark(self) -> Landing:
        event = torch.cuda.Event()
        event.record(self._side)
        return event
