"""How many executors a revision should be on.

Work is counted in windows. Two thresholds and a dwell keep the number from swinging: a revision whose work fills most
of an executor's time, twice in a row, gets one more home; one that fills little of it for a minute loses one.
"""

from dataclasses import dataclass

WINDOW_S = 5.0
HOT, COLD = 0.7, 0.3
HOT_WINDOWS, COLD_S = 2, 60.0
MAX_KNOWN = 20_000


@dataclass(slots=True)
class _Record:
    window: int
    work_ms: float = 0.0
    hot_windows: int = 0
    cold_since: int | None = None
    replicas: int = 1


class Popularity:
    """See the module's text. `most` is the number of executors."""

    def __init__(self, *, most: int) -> None:
        self._most = max(1, most)
        self._records: dict[str, _Record] = {}

    def worked(self, revision_id: str, work_ms: float, now: float) -> None:
        """Counts work of a revision, in ms of an executor's time."""
        record = self._records.get(revision_id)
        if record is None:
            if len(self._records) >= MAX_KNOWN:
                # Those with one home are as those that were never heard of.
                self._records = {key: known for key, known in self._records.items() if known.replicas > 1}
            record = self._records[revision_id] = _Record(int(now // WINDOW_S))
        self._roll(record, int(now // WINDOW_S))
        record.work_ms += work_ms

    def replicas(self, revision_id: str, now: float) -> int:
        """Returns how many homes the revision should have, at least 1."""
        record = self._records.get(revision_id)
        if record is None:
            return 1
        self._roll(record, int(now // WINDOW_S))
        return record.replicas

    def homes(self, now: float) -> dict[str, int]:
        """Returns the revisions that should have several homes, and how many."""
        return {key: count for key in list(self._records) if (count := self.replicas(key, now)) > 1}

    def restore(self, homes: dict[str, int], now: float) -> None:
        """Takes over what was known before this process; of a revision that was asked for since, only more homes."""
        for key, count in homes.items():
            if len(self._records) < MAX_KNOWN:
                record = self._records.setdefault(key, _Record(int(now // WINDOW_S)))
                record.replicas = max(record.replicas, min(self._most, count))

    def _roll(self, record: _Record, window: int) -> None:
        """Judges the windows that have ended."""
        while record.window < window:
            load = record.work_ms / (WINDOW_S * 1000 * record.replicas)
            record.hot_windows = record.hot_windows + 1 if load > HOT else 0
            if record.hot_windows >= HOT_WINDOWS:
                record.replicas, record.hot_windows = min(self._most, record.replicas + 1), 0
            if load >= COLD:
                record.cold_since = None
            elif record.cold_since is None:
                record.cold_since = record.window
            elif (record.window - record.cold_since) * WINDOW_S >= COLD_S:
                record.replicas, record.cold_since = max(1, record.replicas - 1), record.window
            record.work_ms = 0.0
            record.window += 1
            if record.replicas == 1 and record.hot_windows == 0 and record.cold_since is not None:
                # Nothing can change before there is work again.
                record.window = window
                record.cold_since = None
