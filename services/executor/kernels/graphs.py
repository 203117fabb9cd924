"""Which captured graph replays a decode step, and which graphs are captured. Pure: no device, no torch.

A graph is captured for a number of rows, a number of active adapters and a kernel variant (none: a base step). A step
takes the smallest bucket that holds it; its spare rows are padding rows of the base, whose results are dropped. The
adapter kernels read their work from memory under a fixed grid, so adapters beyond those at capture are never skipped,
and each variant is right for every step: the number of adapters is part of a bucket because it bounds metadata and
chooses variants, the variant because narrow and wide ranks want different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ADAPTERS = (0, 1, 2, 4, 8, 16)

# (rows, adapters) -> the kernel variants that such steps want, the most usual first
Variants = Callable[[int, int], Sequence[str]]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """What a graph was captured for: up to `rows` decode rows of up to `adapters` distinct adapters, on the kernels of
    `variant` (empty without adapters)."""

    rows: int
    adapters: int
    variant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCost:
    """What one graph costs; to be measured on the device, these defaults are estimates.

    A captured step of L layers has about 10 base and 8 adapter launches a layer. `us_per_launch` is recording and
    instantiation; each bucket also runs once for warm-up. `bytes_per_launch` is the graph's own node memory;
    `row_bytes` the private activations of a row, which graphs captured from large to small share.
    """

    layers: int
    us_per_launch: float = 60.0
    bytes_per_launch: int = 8192
    row_bytes: int = 0

    def launches(self, bucket: Bucket) -> int:
        """Return kernel launches in one step."""
        return self.layers * (18 if bucket.adapters else 10)

    def seconds(self, bucket: Bucket) -> float:
        """Return the time of one capture with its warm-up."""
        return 2 * self.launches(bucket) * self.us_per_launch / 1e6

    def own_bytes(self, bucket: Bucket) -> int:
        """Return the memory that no other graph shares."""
        return self.launches(bucket) * self.bytes_per_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureBudget:
    """What capturing may take: seconds at start, bytes of the device."""

    seconds: float = 60.0
    bytes: int = 2**30


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Return 1, 2, 4, multiples of 8 up to 64, of 32 up to 256, powers of two above; at last `max_rows`."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(96, 257, 32)}
    sizes |= {2**i for i in range(9, 20)}
    return tuple(sorted({s for s in sizes if s < max_rows} | {max_rows}))


def adapter_counts(max_adapters: int) -> tuple[int, ...]:
    """Return `ADAPTERS` below `max_adapters`, and `max_adapters`."""
    return tuple(sorted({n for n in ADAPTERS if n < max_adapters} | {max_adapters}))


def all_buckets(*, max_rows: int, max_adapters: int, variants: Variants) -> list[tuple[int, Bucket]]:
    """Return every bucket that some step needs, with the place of its variant: 0 is the most usual. An adapter has at
    least one row."""
    counts = adapter_counts(max_adapters)
    return [
        (turn, Bucket(rows, adapters, variant))
        for rows in row_sizes(max_rows)
        for adapters in counts
        if adapters == 0 or _below(adapters, counts) < rows
        for turn, variant in enumerate(variants(rows, adapters) if adapters else ("",))
    ]


def _below(value: int, values: Iterable[int]) -> int:
    return max((v for v in values if v < value), default=-1)


def plan_captures(
    *, max_rows: int, max_adapters: int, variants: Variants, cost: CaptureCost, budget: CaptureBudget
) -> tuple[Bucket, ...]:
    """Return the buckets to capture, in capture order: large first, so that they share one memory pool; usual variants
    before the others, which are what is lost when capturing takes longer than was thought.

    What the budget cannot hold is left out, and its steps take another bucket or run eagerly. The largest bucket and
    the base steps come first: they hold every step that any bucket holds. Then usual variants before others, few
    adapters before many, and few rows before many: there the launches weigh most.
    """
    wanted = all_buckets(max_rows=max_rows, max_adapters=max_adapters, variants=variants)
    most = max(b.adapters for _, b in wanted)
    order = sorted(
        wanted,
        key=lambda one: (
            one[0] > 0 or one[1].rows != max_rows or one[1].adapters != most,
            one[1].adapters != 0,
            one[0],
            one[1],
        ),
    )
    seconds, size = 0.0, cost.row_bytes * max_rows
    chosen = []
    for turn, bucket in order:
        seconds += cost.seconds(bucket)
        size += cost.own_bytes(bucket)
        if seconds > budget.seconds or size > budget.bytes:
            break
        chosen.append((turn, bucket))
    return tuple(bucket for _, bucket in sorted(chosen, key=lambda one: (one[0], -one[1].rows, -one[1].adapters)))


def choose_bucket(captured: Iterable[Bucket], *, rows: int, adapters: int, variant: str = "") -> Bucket | None:
    """Return the captured bucket that replays a step with the least spare rows, then the least spare adapters; of those
    the one of the `variant` that the step would take by itself, if it is there.

    A base step takes a base bucket only, and a step with adapters never does. None: run the step eagerly.
    """
    fits = [b for b in captured if b.rows >= rows and b.adapters >= adapters and (b.adapters == 0) == (adapters == 0)]
    return min(fits, key=lambda b: (b.rows, b.adapters, b.variant != variant, b.variant), default=None)
