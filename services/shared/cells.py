"""The numbers of one series: a sum or a value, or the values of a histogram by bucket. Safe from any thread.

OpenTelemetry's own counters and histograms cost several times as much to add to; it reads these when it is asked.
"""

import math
import threading
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.trace import SpanContext

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint


class Number:
    """The cell of a counter or a gauge."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self._lock = threading.Lock()

    def add(self, amount: float) -> None:
        """Adds to the value."""
        with self._lock:
            self.value += amount


class Newest(NamedTuple):
    """The newest value of a bucket that belongs to a sampled trace."""

    value: float
    time_ns: int
    trace_id: int
    span_id: int


class Buckets:
    """The cell of a histogram. A bucket counts values up to its bound, that included; the last one counts the rest."""

    __slots__ = ("_bounds", "_counts", "_lock", "_max", "_min", "_newest", "_started_ns", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._newest: list[Newest | None] = [None] * (len(bounds) + 1)
        self._sum: float = 0
        self._min, self._max = math.inf, -math.inf
        self._started_ns = time.time_ns()
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """How many values there are."""
        return sum(self._counts)

    def put(self, value: float, sampled: SpanContext | None) -> None:
        """Counts a value that is finite and not negative, measured in the span `sampled`."""
        place = bisect_left(self._bounds, value)
        newest = None if sampled is None else Newest(value, time.time_ns(), sampled.trace_id, sampled.span_id)
        with self._lock:
            self._counts[place] += 1
            self._sum += value
            if value < self._min:
                self._min = value
            if value > self._max:
                self._max = value
            if newest is not None:
                self._newest[place] = newest

    def point(self, labels: dict[str, str], now_ns: int) -> "HistogramDataPoint":
        """Returns all of it as OpenTelemetry shows a histogram since its start."""
        # Imported here: nothing of it is needed to count.
        from opentelemetry.sdk.metrics import Exemplar
        from opentelemetry.sdk.metrics.export import HistogramDataPoint

        with self._lock:
            counts, newest = tuple(self._counts), [one for one in self._newest if one is not None]
            total, least, most = self._sum, self._min, self._max
        return HistogramDataPoint(
            attributes=labels,
            start_time_unix_nano=self._started_ns,
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=total,
            bucket_counts=counts,
            explicit_bounds=self._bounds,
            min=least,
            max=most,
            exemplars=[Exemplar({}, one.value, one.time_ns, one.span_id, one.trace_id) for one in newest],
        )
