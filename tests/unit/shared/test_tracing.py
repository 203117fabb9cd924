"""Who may begin a trace, who goes on with one, and how much of them is kept."""

from asyncio import CancelledError
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import StatusCode

from services.shared import tracing
from services.shared.errors import LoraportError
from tests.support.telemetry import recording

ROOT_METHOD = "/loraport.router.v1.InferenceService/Generate"
PEER_METHOD = "/loraport.executor.v1.ExecutorService/Execute"
PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def served(method: str, parent: str = "", *, trusted: bool = True, inside: Callable[[], Any] = lambda: None) -> Any:
    """Serves one call in a context of its own, as grpc does; returns its span."""

    def call() -> Any:
        metadata = {tracing.TRACEPARENT: parent} if parent else {}
        span = tracing.enter(method, metadata, request_id="id-1", trusted=trusted)
        inside()
        span.end()
        return span

    return copy_context().run(call)


def test_a_users_call_begins_a_trace_whatever_it_says_of_one() -> None:
    with recording():
        span = served(ROOT_METHOD, PARENT, trusted=False)
        assert span.is_recording() is False  # it has ended
        assert span.context.trace_id != int("a" * 32, 16)
        assert span.parent is None
        assert tracing.store().find(request_id="id-1")[0] == f"{span.context.trace_id:032x}"


def test_a_peers_call_goes_on_with_its_callers_trace() -> None:
    told: list[Any] = []
    with recording():
        span = served(PEER_METHOD, PARENT, inside=lambda: told.append(tracing.outgoing()))
        assert span.context.trace_id == int("a" * 32, 16)
        assert span.parent.span_id == int("b" * 16, 16)
        assert told == [((tracing.TRACEPARENT, f"00-{'a' * 32}-{span.context.span_id:016x}-01"),)]


@pytest.mark.parametrize("parent", ["", PARENT[:-1] + "0", "00-junk", "00-" + "0" * 32 + "-" + "b" * 16 + "-01"])
def test_nothing_else_makes_a_span(parent: str) -> None:
    with recording() as seen:

        def inside() -> None:
            with tracing.part("a.part") as span:
                assert not span.is_recording()
            assert tracing.outgoing() is None

        served(PEER_METHOD, parent, inside=inside)
        assert seen.spans() == []


def test_what_the_sampler_leaves_out_costs_the_others_nothing() -> None:
    restore = tracing.use(TracerProvider(sampler=ParentBased(ALWAYS_OFF)))
    try:
        told: list[Any] = []
        served(ROOT_METHOD, inside=lambda: told.append(tracing.outgoing()))
        assert told == [None]
        assert tracing.store().find(request_id="id-1") == ("", [])
    finally:
        restore()


def test_a_request_that_is_left_out_has_an_id_and_no_spans() -> None:
    provider = TracerProvider()
    restore = tracing.use(provider, ratio=0.0)
    try:
        seen: list[Any] = []

        def inside() -> None:
            with tracing.part("router.queue", cold=True) as span:
                tracing.note(executor="e0")
                seen.extend([span.is_recording(), tracing.begin("router.attempt").is_recording()])
                seen.extend([tracing.current().get_span_context().trace_id, tracing.sampled(), tracing.outgoing()])

        span = served(ROOT_METHOD, inside=inside)
        assert span.get_span_context().is_valid
        assert seen == [False, False, span.get_span_context().trace_id, None, None]
        assert tracing.store().find(request_id="id-1") == ("", [])
        # A peer's trace is gone on with whatever the ratio says.
        assert served(PEER_METHOD, PARENT).get_span_context().trace_flags.sampled
    finally:
        restore()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        # What an error says may be a request's own text.
        (ValueError("canary"), (StatusCode.ERROR, "ValueError")),
        (LoraportError("INVALID_REQUEST", "canary"), (StatusCode.ERROR, "INVALID_REQUEST")),
        (CancelledError(), (StatusCode.UNSET, None)),
    ],
)
def test_an_error_that_leaves_a_part_is_its_status(error: BaseException, status: tuple[StatusCode, str | None]) -> None:
    def inside() -> None:
        whole = tracing.current()
        with pytest.raises(type(error)), tracing.part("router.queue") as span:
            assert tracing.current() is span
            raise error
        assert tracing.current() is whole

    with recording():
        served(ROOT_METHOD, inside=inside)
        _, [whole, part] = tracing.store().find(request_id="id-1")
        assert (part.status.status_code, part.status.description) == status
        assert part.events == ()
        assert whole.status.is_unset


def test_parts_are_below_the_call_and_facts_are_kept() -> None:
    def inside() -> None:
        with tracing.part("router.queue", cold=True):
            tracing.note(executor="e0")

    with recording():
        span = served(ROOT_METHOD, inside=inside)
        _, spans = tracing.store().find(request_id="id-1")
        assert [one.name for one in spans] == ["router.InferenceService.Generate", "router.queue"]
        assert spans[1].parent.span_id == span.context.span_id
        assert dict(spans[1].attributes) == {"cold": True, "executor": "e0"}


def test_memory_is_bounded() -> None:
    provider = TracerProvider()
    restore = tracing.use(provider, kept=4)
    try:
        traces = [served(ROOT_METHOD, inside=_many_parts) for _ in range(10)]
        kept = [bool(tracing.store().find(trace_id=f"{span.context.trace_id:032x}")[1]) for span in traces]
        assert kept == [False] * 6 + [True] * 4
        _, spans = tracing.store().find(trace_id=f"{traces[-1].context.trace_id:032x}")
        assert len(spans) == tracing.MAX_SPANS
        assert spans[0].parent is None, "the call itself is kept"
        assert tracing.store().find(trace_id="f" * 32) == ("", [])
    finally:
        restore()


def _many_parts() -> None:
    for _ in range(tracing.MAX_SPANS + 5):
        with tracing.part("loader.load.fetch"):
            pass
