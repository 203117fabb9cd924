"""`loraport trace`: one request's story, over all services, in one screen."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, note, plain, print_json, say

if TYPE_CHECKING:
    from loraport.telemetry.v1.telemetry_service_pb2 import Span

BAR = 24
# Facts that are shown first, in this order; the others follow.
FIRST = ("revision_id", "executor", "start", "outcome", "reason", "why")
HIDDEN = ("request_id", "code")


def trace(
    request: Annotated[
        str, typer.Argument(help="A request's id, as `loraport generate --json` shows it, or a trace id.")
    ],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Show what every service did for one request, and how long it took.

    Services keep the newest traces in memory, of the part of requests that their configuration samples.
    """
    from loraport.operations import OperationsClient

    with OperationsClient.local(data) as operations:
        trace_id, spans, silent = operations.trace(request)
    for name, error in silent.items():
        note(f"{name} did not answer: {error}")
    if not trace_id:
        note(f"nobody knows {request}: it was not sampled, or newer traces took its place (see telemetry.trace_ratio)")
        raise typer.Exit(1)
    if as_json:
        print_json({"trace_id": trace_id, "spans": [_row(span) for span in spans]})
    else:
        _print(trace_id, spans)


def _row(span: "Span") -> dict[str, Any]:
    return {
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id or None,
        "service": span.service,
        "name": span.name,
        "start_time": span.start_time.ToJsonString(),
        "elapsed_ms": round(span.elapsed_ms, 3),
        "attributes": dict(sorted(span.attributes.items())),
    }


def _print(trace_id: str, spans: "list[Span]") -> None:
    first_ms = spans[0].start_time.ToNanoseconds() / 1e6
    whole_ms = max(span.start_time.ToNanoseconds() / 1e6 + span.elapsed_ms for span in spans) - first_ms
    services = ", ".join(dict.fromkeys(span.service for span in spans))
    say(f"trace {trace_id}: {whole_ms:.1f} ms, {len(spans)} spans of {services}")
    for depth, span in _tree(spans):
        begun_ms = span.start_time.ToNanoseconds() / 1e6 - first_ms
        label = "  " * depth + span.name
        bar = _bar(begun_ms, span.elapsed_ms, whole_ms)
        say(f"{begun_ms:9.1f} ms {bar} {span.elapsed_ms:9.1f} ms  {label}{_facts(span)}")


def _tree(spans: "list[Span]") -> "list[tuple[int, Span]]":
    """Returns the spans with their depths, each before its parts; one whose parent is not there stands alone."""
    known = {span.span_id for span in spans}
    below: dict[str, list[Any]] = {}
    for span in spans:
        below.setdefault(span.parent_span_id if span.parent_span_id in known else "", []).append(span)
    found: list[tuple[int, Any]] = []
    open_spans = [(0, span) for span in reversed(below.get("", []))]
    while open_spans:
        depth, span = open_spans.pop()
        found.append((depth, span))
        open_spans += [(depth + 1, part) for part in reversed(below.get(span.span_id, []))]
    return found


def _bar(begun_ms: float, elapsed_ms: float, whole_ms: float) -> str:
    scale = BAR / whole_ms if whole_ms > 0 else 0.0
    left = min(BAR - 1, max(0, int(begun_ms * scale)))
    size = min(BAR - left, max(1, round(elapsed_ms * scale)))
    return "·" * left + "█" * size + "·" * (BAR - left - size)


def _facts(span: "Span") -> str:
    names = [name for name in FIRST if name in span.attributes]
    names += sorted(name for name in span.attributes if name not in (*FIRST, *HIDDEN))
    facts = [f"{name} {_short(span.attributes[name])}" for name in names if span.attributes[name]]
    return "  " + plain(", ".join(facts)) if facts else ""


def _short(value: str) -> str:
    if value.startswith("sha256:"):
        return value[:19]
    try:
        return value if value.isdigit() or len(value) < 7 else f"{float(value):.1f}"
    except ValueError:
        return value
