"""A GPU's order of work without a GPU: streams, events and graphs as torch.cuda has them, and who may touch what when.

Work is done at once, in the order of the program. Beside it a clock is kept per stream and for the host: what one of
them has done that another can be sure of. A launch comes after what the host did before it; `wait_stream` and events
order streams; an event that was asked and has landed, or was waited for, orders the host. Two accesses to the same
number, one of them a write, that no such chain orders are a `Race`: on a device they may happen in either order.

Only tensors that are `track`ed are watched, number by number, through views and index operations. Copies to the host are
not taken as an order: nothing may rest on a sampler's asking for its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.recorded_graphs import RecordedGraph, recording

HOST, STEPS = "host", "steps"
aten = torch.ops.aten
# Operations that touch only some rows of their first argument: (dimension, index) follow it.
_SOME_ROWS = {"aten::index_copy_", "aten::index_fill_", "aten::index_select"}


class Race(AssertionError):
    """Two accesses that nothing orders."""


class Stream:
    def __init__(self, cuda: Streams, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.clock: dict[str, int] = {}

    def wait_stream(self, other: Stream) -> None:
        _join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)


class Event:
    def __init__(self, cuda: Streams) -> None:
        self.cuda = cuda
        self.clock: dict[str, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.cuda.current).clock)

    def query(self) -> bool:
        if self.cuda.landed:
            self.synchronize()
        return self.cuda.landed

    def synchronize(self) -> None:
        assert not self.cuda.capturing, "a capture waits for nothing"
        _join(self.cuda.host.clock, self.clock)


class _Watched:
    """The last access of each stream to each number of one storage."""

    def __init__(self, name: str, tensor: torch.Tensor, *, on_host: bool) -> None:
        self.name, self.dtype, self.on_host = name, tensor.dtype, on_host
        self.numbers = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.writes: dict[str, torch.Tensor] = {}
        self.reads: dict[str, torch.Tensor] = {}
        self.keep = tensor  # its address belongs to it as long as it is watched

    def of(self, book: dict[str, torch.Tensor], who: str) -> torch.Tensor:
        if who not in book:
            book[who] = torch.zeros(self.numbers, dtype=torch.int32)
        return book[who]


class Streams(TorchDispatchMode):
    """Stands in for torch.cuda (`install`), and watches tensors while it is entered. `landed`: copies have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.steps = Stream(self, HOST), Stream(self, STEPS)
        self.current = self.steps
        self.made = 0
        self.time = 0
        self.landed = True
        self.capturing = False
        self.graphs: list[RecordedGraph] = []
        self._watched: dict[int, _Watched] = {}

    def track(self, name: str, *tensors: torch.Tensor, on_host: bool = False) -> None:
        """Watch tensors of the device, or pinned ones of the host; what was done to them so far is over."""
        for tensor in tensors:
            key = tensor.untyped_storage().data_ptr()
            if key not in self._watched:
                self._watched[key] = _Watched(name, tensor, on_host=on_host)

    def install(self, patch: Callable[..., None]) -> None:
        """Put the stand-ins in place with a test's monkeypatch.setattr; pinned memory is plain memory."""
        for name in ("tensor", "zeros", "empty"):
            plain = getattr(torch, name)
            patch(torch, name, lambda *a, pin_memory=False, plain=plain, **k: plain(*a, **k))
        patch(torch.cuda, "Stream", lambda device=None: self._new_stream())
        patch(torch.cuda, "Event", lambda: Event(self))
        patch(torch.cuda, "current_stream", lambda device=None: self.current)
        patch(torch.cuda, "stream", self._use)
        patch(torch.cuda, "CUDAGraph", _Graph)
        patch(torch.cuda, "graph", self._capture)
        patch(torch.cuda, "synchronize", lambda device=None: self._synchronize())
        patch(torch.cuda, "mem_get_info", lambda device=None: (2**30 - 2**20 * len(self.graphs), 2**30))

    def _new_stream(self) -> Stream:
        self.made += 1
        return Stream(self, f"side {self.made}")

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def _capture(self, graph: _Graph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads pin memory meanwhile"
        self.capturing = True
        with recording(graph):
            yield
        self.capturing = False
        self.graphs.append(graph)

    def _synchronize(self) -> None:
        _join(self.host.clock, self.steps.clock)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What is captured is not done, but noted; and what only looks at a tensor in another way does not touch it.
        if not self.capturing and not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        some = args[1:3] if func._schema.name in _SOME_ROWS else None
        touched = []
        for number, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and self._find(tensor) is not None:
                    touched.append((tensor, writes, some if number == 0 else None))
        if touched:
            on_host = all(self._find(tensor).on_host for tensor, *_ in touched)
            for tensor, writes, rows in touched:
                self.access(tensor, writes=writes, rows=rows, who=self.host if on_host else self.current)

    def _find(self, tensor: torch.Tensor) -> _Watched | None:
        if tensor.layout is not torch.strided:
            return None
        return self._watched.get(tensor.untyped_storage().data_ptr())

    def access(
        self, tensor: torch.Tensor, *, writes: bool, rows: Any = None, who: Stream | None = None
    ) -> None:  # fmt: skip
        """Note that a stream (the current one) reads or writes a watched tensor, or those rows (dimension, index) of it.

        Raises:
            Race: something else did, and nothing says which of the two comes first.
        """
        watched, who = self._find(tensor), who or self.current
        assert watched is not None
        assert watched.dtype == tensor.dtype
        if who is not self.host:
            _join(who.clock, self.host.clock)  # a launch comes after what the host did before it
        self.time += 1
        who.clock[who.name] = self.time

        def part(book: torch.Tensor) -> torch.Tensor:
            return book.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        for what, book in (("written", watched.writes), ("read", watched.reads)):
            if what == "read" and not writes:
                continue
            for other, times in book.items():
                seen = part(times) if rows is None else part(times).index_select(*rows)
                if seen.numel() and int(seen.max()) > who.clock.get(other, 0):
                    verb = "writes" if writes else "reads"
                    raise Race(f"{who.name} {verb} {watched.name} that {other} has {what}, in no order")
        mine = part(watched.of(watched.writes if writes else watched.reads, who.name))
        mine.fill_(self.time) if rows is None else mine.index_fill_(*rows, self.time)


class _Graph(RecordedGraph):
    """A CUDAGraph."""

    def pool(self) -> object:
        return self


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)
