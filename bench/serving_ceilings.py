"""What the machine and the work allow: memory and arithmetic bounds of a decode step, and where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.serving_work import Adapter
from services.executor.model.interface import Decoder


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates: bytes read per second, and float32 operations per second."""

    bytes_s: float
    flops_s: float


def measure_machine() -> Machine:
    """Return the best of a few short tries of reading memory and of one large product."""
    block, square = torch.ones(64 << 20), torch.ones(1024, 1024)
    read = min(_timed(lambda: block.sum()) for _ in range(5))
    product = min(_timed(lambda: square @ square) for _ in range(5))
    return Machine(block.nbytes / read, 2 * 1024**3 / product)


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Least milliseconds of a decode step by what it must read, and by what it must compute."""

    memory_ms: float
    arithmetic_ms: float

    @property
    def ms(self) -> float:
        return max(self.memory_ms, self.arithmetic_ms)


def ceiling(
    machine: Machine, decoder: Decoder, owners: Sequence[str | None], adapters: Sequence[Adapter], *, context: int
) -> Ceiling:
    """Every weight of the base once, every distinct adapter once, every row's keys and values once; head included."""
    info = decoder.info
    width = info.dtype.itemsize
    head = info.vocab_size * info.hidden_size
    linears = head + sum(g.layers * g.in_features * sum(g.out_features) for g in decoder.groups if g.layers > 1)
    per_rank = sum(g.values_per_rank for g in decoder.groups if g.layers > 1)
    rows = len(owners)
    ranks = {a.name: a.rank for a in adapters}
    cached = 2 * info.layers * info.kv_heads * info.head_dim * context
    read = width * (linears + rows * cached) + 4 * per_rank * sum(ranks[name] for name in set(owners) if name)
    attended = 2 * info.layers * info.heads * info.head_dim * context
    computed = rows * (linears + attended) + per_rank * sum(ranks[name] for name in owners if name)
    return Ceiling(read / machine.bytes_s * 1000, 2 * computed / machine.flops_s * 1000)


class Breakdown:
    """Where the milliseconds of a step go. Wraps the engine's parts while `watch` is open; clocks cost about 0.1 µs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.ms: dict[str, float] = {}
        self.steps = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count every step that is made inside, by replacing methods of one engine and putting them back."""
        from services.executor.engine import runner as runner_module
        from services.executor.model import attention, lora_linear, products

        runner, scheduler = self._engine._runner, self._engine._scheduler
        places = [
            (products.Linear, "__call__", "products"), (products.Linear, "add_to", "products"),
            (lora_linear.LoraBatch, "add", "lora"), (attention.AttentionBatch, "attend", "attention"),
            (attention.AttentionBatch, "rotate_and_attend", "attention"),
            (type(runner.decoder), "hidden", "hidden"), (type(runner.decoder), "logits", "logits"),
            (runner_module, "sample", "sample"), (type(runner), "run", "run"),
            (type(scheduler), "plan", "plan"), (type(scheduler), "commit", "commit"),
            (type(self._engine), "step", "step"),
        ]  # fmt: skip
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for owner, name, label in places:
            setattr(owner, name, self._timed(getattr(owner, name), label))
        try:
            yield
        finally:
            for owner, name, old in kept:
                setattr(owner, name, old)

    def _timed(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.ms[label] = self.ms.get(label, 0.0) + (time.perf_counter() - started) * 1000
                self.steps += label == "step"

        return timed

    def parts(self) -> dict[str, float]:
        """Return milliseconds per step by part; they add up to `step`."""
        of = {label: value / max(1, self.steps) for label, value in self.ms.items()}
        head = of["logits"]
        layers = of["products"] - head
        known = {
            "base products": layers,
            "adapters": of.get("lora", 0.0),
            "attention": of["attention"],
            "norms, activation, rope where it is apart": of["hidden"] - layers - of.get("lora", 0.0) - of["attention"],
            "head": head,
            "sampling": of["sample"],
            "packing": of["run"] - of["hidden"] - head - of["sample"],
            "plan and commit": of["plan"] + of["commit"],
            "events and loop": of["step"] - of["run"] - of["plan"] - of["commit"],
        }
        return {**known, "step": of["step"]}

    @property
    def overhead(self) -> float:
        """Share of a step outside the model's forward pass and head."""
        of = self.ms
        return 1 - (of["hidden"] + of["logits"]) / of["step"]
