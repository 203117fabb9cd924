"""What work costs, in milliseconds of an executor's time, learned from what the executors report.

An executor counts its steps: how long they took and what they computed. Time is taken to be linear in that,

    busy = step * steps + prefill * prompt tokens + row * decode rows + context * tokens read + adapter * MiB read

so the difference between two reports is one equation, however many steps lie between. Coefficients are the least
squares of the equations, older ones counting less, pulled towards a built-in prior and never negative. Loads are
fixed + bytes / bandwidth, learned in the same way from the loads that requests waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# What one equation counts for after the next has come.
FORGET = 0.98
# The prior counts as one equation of a tenth of a second for each coefficient.
PRIOR_MS = 100.0
# A coefficient stays within this factor of its prior, so that a fault in a report makes nothing free.
RANGE = 1000.0
# Scales that make the unknowns comparable: ms per step, per token read, per MiB read.
STEP_SCALE, CONTEXT_SCALE, ADAPTER_SCALE = 10.0, 0.001, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """What an executor computed since its start. `adapter_mib` sums, over steps, each distinct adapter once."""

    steps: int = 0
    busy_ms: float = 0.0
    prefill_tokens: int = 0
    decode_rows: int = 0
    context_tokens: int = 0
    adapter_mib: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Milliseconds: per prompt token that is computed, per row of a decode step (with its part of the step's fixed
    cost), per token of context that the row reads, per MiB of an adapter that a step reads, per load and its MiB."""

    prefill: float = 1.0
    row: float = 2.0
    context: float = 0.0
    adapter: float = 0.0
    load: float = 1000.0
    load_mib: float = 0.0

    def prefill_ms(self, tokens: int) -> float:
        """Returns what computing so many prompt tokens takes."""
        return self.prefill * tokens

    def decode_ms(self, *, tokens: int, context: int, adapter_mib: float, sharing: int) -> float:
        """Returns one row's part of `tokens` steps; the adapter is read once for all rows that share it."""
        return tokens * (self.row + self.context * context + self.adapter * adapter_mib / max(1, sharing))

    def load_ms(self, mib: float) -> float:
        """Returns what bringing so many MiB to the device takes."""
        return self.load + self.load_mib * mib


class PriceBook:
    """Prices by base model. Reports of one executor may come late or be missed; a restart begins anew."""

    def __init__(self, prior: Prices) -> None:
        self._prior = prior
        self._bases: dict[str, _Base] = {}
        self._heard: dict[str, tuple[int, StepTotals]] = {}

    def of(self, base_model: str) -> Prices:
        """Returns the prices of a base model, the prior until something was learned."""
        base = self._bases.get(base_model)
        return base.prices if base is not None else self._prior

    def observe(self, executor: str, base_model: str, *, epoch: int, totals: StepTotals) -> None:
        """Learns from an executor's totals; the first of a process only say where to count from."""
        before = self._heard.get(executor)
        self._heard[executor] = (epoch, totals)
        if before is None or before[0] != epoch or totals.steps <= before[1].steps:
            return
        was = before[1]
        self._base(base_model).steps(
            StepTotals(
                steps=totals.steps - was.steps,
                busy_ms=totals.busy_ms - was.busy_ms,
                prefill_tokens=totals.prefill_tokens - was.prefill_tokens,
                decode_rows=totals.decode_rows - was.decode_rows,
                context_tokens=totals.context_tokens - was.context_tokens,
                adapter_mib=totals.adapter_mib - was.adapter_mib,
            )
        )

    def observe_load(self, base_model: str, *, mib: float, ms: float) -> None:
        """Learns from a load that a request waited for."""
        if ms > 0 and mib >= 0:
            self._base(base_model).loaded(mib, ms)

    def _base(self, base_model: str) -> "_Base":
        return self._bases.setdefault(base_model, _Base(self._prior))


class _Base:
    """The equations of one base model."""

    def __init__(self, prior: Prices) -> None:
        self._prior = prior
        self._work = _Fit(
            scales=(STEP_SCALE, prior.prefill or 1.0, prior.row, CONTEXT_SCALE, ADAPTER_SCALE),
            priors=(0.0, prior.prefill, prior.row, prior.context, prior.adapter),
        )
        self._loads = _Fit(scales=(prior.load or 1.0, 1.0), priors=(prior.load, prior.load_mib))
        self._steps = self._rows = 0.0
        self.prices = prior

    def steps(self, change: StepTotals) -> None:
        features = (
            change.steps, change.prefill_tokens, change.decode_rows, change.context_tokens, change.adapter_mib,
        )  # fmt: skip
        if min(features) < 0 or change.busy_ms < 0:
            return
        self._work.add([float(value) for value in features], change.busy_ms)
        self._steps = self._steps * FORGET + change.steps
        self._rows = self._rows * FORGET + change.decode_rows
        self._settle()

    def loaded(self, mib: float, ms: float) -> None:
        self._loads.add([1.0, mib], ms)
        self._settle()

    def _settle(self) -> None:
        step, prefill, row, context, adapter = self._work.solve()
        load, load_mib = self._loads.solve()
        prior = self._prior
        self.prices = Prices(
            prefill=_within(prefill, prior.prefill),
            # A step's fixed cost is shared by its rows.
            row=_within(row + step * self._steps / max(1.0, self._rows, self._steps), prior.row),
            context=context,
            adapter=adapter,
            load=max(load, 0.1),
            load_mib=load_mib,
        )


def _within(value: float, prior: float) -> float:
    return min(max(value, prior / RANGE), prior * RANGE)


class _Fit:
    """Least squares with forgetting, a prior, and no negative coefficient."""

    def __init__(self, *, scales: Sequence[float], priors: Sequence[float]) -> None:
        size = len(scales)
        self._scales = tuple(scales)
        self._prior = [prior / scale for prior, scale in zip(priors, scales, strict=True)]
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size

    def add(self, features: Sequence[float], value: float) -> None:
        scaled = [feature * scale for feature, scale in zip(features, self._scales, strict=True)]
        for row, left in enumerate(scaled):
            self._targets[row] = self._targets[row] * FORGET + left * value
            for column, right in enumerate(scaled):
                self._products[row][column] = self._products[row][column] * FORGET + left * right

    def solve(self) -> list[float]:
        """Returns the coefficients."""
        free = list(range(len(self._scales)))
        while True:
            matrix = [[self._products[r][c] + (PRIOR_MS**2 if r == c else 0.0) for c in free] for r in free]
            targets = [self._targets[r] + PRIOR_MS**2 * self._prior[r] for r in free]
            found = dict(zip(free, _solve(matrix, targets), strict=True))
            worst = min(found, key=lambda index: found[index])
            if found[worst] >= 0:
                return [found.get(index, 0.0) * scale for index, scale in enumerate(self._scales)]
            free.remove(worst)


def _solve(matrix: list[list[float]], targets: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is symmetric and positive definite, so its pivots are positive."""
    rows = [[*row, target] for row, target in zip(matrix, targets, strict=True)]
    size = len(rows)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = rows[row][pivot] / rows[pivot][pivot]
            rows[row] = [value - factor * above for value, above in zip(rows[row], rows[pivot], strict=True)]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (rows[row][size] - known) / rows[row][row]
    return found
