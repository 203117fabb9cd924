"""The requests that were accepted and have not ended: whom to tell, and which lease to give back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from services.executor.engine.loads import Lease
from services.executor.request import Ended, Event

Sink = Callable[[Event], None]


@dataclass(slots=True)
class _Open:
    sink: Sink
    lease: Lease | None


class OpenRequests:
    """Guarded by the engine's lock; `deliver` takes it itself, and runs on the device thread."""

    def __init__(
        self, lock: threading.RLock, *, cancel: Callable[[str], None], on_fault: Callable[[BaseException], None]
    ) -> None:
        self._lock = lock
        self._cancel = cancel
        self._on_fault = on_fault
        self._by_id: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, request_id: str, sink: Sink, lease: Lease | None) -> None:
        self._by_id[request_id] = _Open(sink, lease)

    def give_back(self, events: tuple[Event, ...]) -> None:
        """Release the leases of requests that end with these events, before they are told."""
        for event in events:
            lease = self._by_id[event.request_id].lease
            if isinstance(event, Ended) and lease is not None:
                lease.release()

    def deliver(self, events: tuple[Event, ...]) -> None:
        """Tell the sinks. The last event of a request comes after its lease was given back; a sink that fails loses
        its request."""
        for event in events:
            with self._lock:
                ended = isinstance(event, Ended)
                record = self._by_id.pop(event.request_id) if ended else self._by_id[event.request_id]
                if ended and record.lease is not None:
                    record.lease.release()
            try:
                record.sink(event)
            except Exception as error:
                self._on_fault(error)
                if not ended:
                    self._cancel(event.request_id)
