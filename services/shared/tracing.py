"""One trace per request: spans in, W3C context on the wire, and the newest traces in memory.

A request of a user, an upload or an import begins a trace, if the sampler takes it; a call of a peer or an admin
continues the caller's, if that is sampled; nothing else makes spans. What a user sends as `traceparent` is not looked
at: nobody outside decides what is sampled, or hides in somebody else's trace.

Attributes are facts that this code states (ids of revisions, names of executors, counts, times), never text that came
with a request. The one exception is the request id, by which its caller finds it.

The current span is in a context variable of ours: to ask OpenTelemetry's costs ten times as much, and a request that is
not sampled asks a dozen times.
"""

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from services.shared.telemetry import TelemetryConfig

TRACEPARENT = "traceparent"
REQUEST_ID = "request_id"
MAX_SPANS = 256
# What begins a trace where nobody has begun one.
ROOTS = frozenset(
    {
        "/loraport.router.v1.InferenceService/Generate",
        "/loraport.router.v1.InferenceService/Score",
        "/loraport.loader.v1.LoaderService/Upload",
        "/loraport.loader.v1.LoaderService/Import",
    }
)
_PROPAGATOR = TraceContextTextMapPropagator()
Attribute = str | int | float | bool

_CURRENT: ContextVar[Span] = ContextVar("loraport_span", default=INVALID_SPAN)
_NOTHING: AbstractContextManager[Span] = nullcontext(INVALID_SPAN)

_tracer: trace.Tracer = trace.get_tracer("loraport")
# The part of the requests that begin a trace which is taken.
_ratio = 1.0


class TraceStore:
    """The newest traces that passed this process, as an OpenTelemetry span processor. Safe from any thread."""

    def __init__(self, kept: int) -> None:
        """`kept` is the number of traces; each has at most MAX_SPANS spans."""
        self._kept = kept
        self._lock = threading.Lock()
        self._traces: OrderedDict[str, list[Any]] = OrderedDict()
        self._requests: OrderedDict[str, str] = OrderedDict()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Nothing: a span counts when it has ended."""

    def _on_ending(self, span: Any) -> None:
        """Nothing."""

    def on_end(self, span: Any) -> None:
        """Keeps a span that has ended."""
        trace_id = trace.format_trace_id(span.context.trace_id)
        request_id = (span.attributes or {}).get(REQUEST_ID)
        with self._lock:
            spans = self._traces.setdefault(trace_id, [])
            self._traces.move_to_end(trace_id)
            # The last one to end is the first of a trace, or what holds it together here: it takes another's place.
            spans[MAX_SPANS - 1 :] = [span]
            if request_id:
                self._requests[str(request_id)] = trace_id
            while len(self._traces) > self._kept:
                self._traces.popitem(last=False)
            while len(self._requests) > self._kept:
                self._requests.popitem(last=False)

    def shutdown(self) -> None:
        """Nothing."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here."""
        return True

    def find(self, *, trace_id: str = "", request_id: str = "") -> tuple[str, list[Any]]:
        """Returns the trace of a request and its ended spans by their start; an empty id when it is not known."""
        with self._lock:
            found = trace_id or self._requests.get(request_id, "")
            spans = list(self._traces.get(found, ()))
        return (found if spans else ""), sorted(spans, key=lambda span: span.start_time)


_store: TraceStore = TraceStore(1)


def start(resource: "Resource", config: "TelemetryConfig", *, export: bool) -> None:
    """Begins to record; `export` sends spans over OTLP as well. Called once."""
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    # What is not to be sampled is not asked for (`enter`).
    provider = SdkTracerProvider(sampler=ALWAYS_ON, resource=resource)
    use(provider, kept=config.traces_kept, ratio=config.trace_ratio)
    if export:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from services.shared.telemetry import otlp_target

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(**otlp_target(config.otlp_endpoint))))
    trace.set_tracer_provider(provider)


def use(provider: TracerProvider, *, kept: int = 16, ratio: float = 1.0) -> Callable[[], None]:
    """Makes spans with `provider`, an SDK's, from now on, and keeps them; returns what takes that back.

    `ratio` is the part of requests that begin a trace for which it is asked.
    """
    global _tracer, _store, _ratio
    before = _tracer, _store, _ratio

    def restore() -> None:
        global _tracer, _store, _ratio
        _tracer, _store, _ratio = before

    _tracer, _store, _ratio = provider.get_tracer("loraport"), TraceStore(kept), ratio
    provider.add_span_processor(_store)  # type: ignore[attr-defined]
    return restore


def store() -> TraceStore:
    """Returns the newest traces of this process."""
    return _store


def enter(method: str, metadata: Mapping[str, str], *, request_id: str, trusted: bool) -> Span:
    """Begins the span of a call that is served, and makes it the current one for the rest of its task.

    `trusted` says that the caller is one whose `traceparent` counts. Without a trace the span is one of nothing.
    """
    parent = Context()
    if trusted and TRACEPARENT in metadata:
        parent = _PROPAGATOR.extract({TRACEPARENT: metadata[TRACEPARENT]}, parent)
        if not trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            return INVALID_SPAN
    elif method not in ROOTS:
        return INVALID_SPAN
    elif random.random() >= _ratio:  # noqa: S311
        return _left_out()
    name = method.removeprefix("/loraport.").replace(".v1.", ".").replace("/", ".")
    span = _tracer.start_span(name, parent, kind=SpanKind.SERVER)
    if method in ROOTS and span.is_recording():
        span.set_attribute(REQUEST_ID, request_id)
    _CURRENT.set(span)
    return span


def _left_out() -> Span:
    """Makes current what is not recorded; its trace has an id all the same, which log lines show."""
    context = SpanContext(random.getrandbits(128), random.getrandbits(64), is_remote=False)
    span = NonRecordingSpan(context)
    _CURRENT.set(span)
    return span


def sampled() -> SpanContext | None:
    """Returns the context of the current span if its trace is sampled."""
    context = _CURRENT.get().get_span_context()
    return context if context.trace_flags & TraceFlags.SAMPLED else None


def traceparent() -> str:
    """Returns what lets a peer go on with the current trace, in W3C's form; empty where there is none."""
    context = sampled()
    if context is None:
        return ""
    return f"00-{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}-01"


def outgoing() -> tuple[tuple[str, str], ...] | None:
    """Returns `traceparent` as the metadata of a call, None where it is empty."""
    value = traceparent()
    return ((TRACEPARENT, value),) if value else None


def begin(name: str, **attributes: Attribute) -> Span:
    """Begins a part of the current span, for its owner to `end`; it does not become the current one."""
    current = _CURRENT.get()
    return _below(current, name, attributes) if current.is_recording() else INVALID_SPAN


def part(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """What happens inside is a part of the current span. Not around a `yield` of a generator."""
    current = _CURRENT.get()
    return _Part(current, name, attributes) if current.is_recording() else _NOTHING


def note(**attributes: Attribute) -> None:
    """States facts about the current span."""
    span = _CURRENT.get()
    if span.is_recording():
        span.set_attributes(attributes)


def current() -> Span:
    """Returns the current span; one of nothing where there is none."""
    return _CURRENT.get()


def _below(parent: Span, name: str, attributes: Mapping[str, Attribute]) -> Span:
    return _tracer.start_span(name, trace.set_span_in_context(parent, Context()), attributes=attributes)


class _Part:
    """A part of a span that is recorded: current inside; an error that leaves it is its status."""

    __slots__ = ("_attributes", "_name", "_span", "_whole")

    def __init__(self, whole: Span, name: str, attributes: Mapping[str, Attribute]) -> None:
        self._whole = whole
        self._name = name
        self._attributes = attributes

    def __enter__(self) -> Span:
        self._span = _below(self._whole, self._name, self._attributes)
        _CURRENT.set(self._span)
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _at: TracebackType | None
    ) -> None:
        # Not by a token: a generator may be closed in another context than it ran in.
        _CURRENT.set(self._whole)
        if isinstance(error, Exception):  # a cancellation is none
            # Its reason where it has one: what an error says may be text of a request, or name a tenant.
            self._span.set_status(Status(StatusCode.ERROR, getattr(error, "reason", type(error).__name__)))
        self._span.end()
