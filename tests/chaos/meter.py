"""What the processes of a stack hold on to, over time."""

import contextlib
import statistics
from dataclasses import dataclass, field

import psutil
import valkey

from tests.e2e.harness import Stack

# What may differ between the first and the last third of a soak: a part of RSS and some bytes, and counts.
RSS_PART, RSS_BYTES, FDS, THREADS, KEYS = 0.10, 16 << 20, 8, 8, 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A process, with its children, at one moment."""

    rss: int
    fds: int
    threads: int


@dataclass(slots=True)
class Meter:
    """Samples by process, and the notice board's number of keys."""

    stack: Stack
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)

    def sample(self) -> None:
        """Looks once."""
        for name, pid in self.stack.processes().items():
            try:
                process = psutil.Process(pid)
                family = [process, *process.children(recursive=True)]
                found = Sample(
                    sum(each.memory_info().rss for each in family),
                    sum(each.num_fds() for each in family),
                    sum(each.num_threads() for each in family),
                )
            except psutil.NoSuchProcess:
                continue
            self.samples.setdefault(name, []).append(found)
        password = (self.stack.data / "secrets" / "valkey").read_text()
        # One look that comes to nothing on a busy machine is no end of a soak.
        with (
            contextlib.suppress(valkey.ValkeyError),
            valkey.Valkey(port=self.stack.port_base + 20, password=password, socket_timeout=5) as board,
        ):
            self.keys.append(int(board.dbsize()))

    def rows(self) -> list[tuple[str, str, float, float, bool]]:
        """Returns (process, what, first third, last third, whether it is flat)."""
        rows = []
        for name, samples in self.samples.items():
            for what in ("rss", "fds", "threads"):
                first, last = _thirds([getattr(sample, what) for sample in samples])
                allowed = {"rss": max(first * RSS_PART, RSS_BYTES), "fds": FDS, "threads": THREADS}[what]
                rows.append((name, what, first, last, last - first <= allowed))
        first, last = _thirds(self.keys)
        rows.append(("valkey", "keys", first, last, last - first <= KEYS))
        return rows


def _thirds(values: list[int]) -> tuple[float, float]:
    """Returns the medians of the first and of the last third."""
    third = max(1, len(values) // 3)
    return statistics.median(values[:third]), statistics.median(values[-third:])
