"""`loraport audit`: who did what, and whether the record of it is whole."""

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, OptionalTenant, print_json, print_rows, say, time_text

app = typer.Typer(help="Audit events: who did what, and what was refused.", no_args_is_help=True)


@app.command("list")
def list_events(
    tenant: OptionalTenant = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most to show, the newest.")] = 100,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """List audit events, newest first."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        rows = [_row(event) for event in islice(admin.list_audit_events(tenant), limit)]
    columns = ("sequence", "time", "principal", "method", "resource", "decision", "reason")
    print_rows(rows, as_json=as_json, columns=columns, empty="no audit events")


@app.command("verify")
def verify(
    memory: Annotated[
        Path | None,
        typer.Option(help="File of the last hash seen. Default: state/audit-chain.json in the data directory."),
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> int:
    """Check the whole chain of audit events, and name the first one that was changed, dropped, moved or cut off.

    Exit code 0 when it is whole, goes on from what the last check saw, and has the events that the registry's log
    names; 1 when not. Whether that log is whole is the question of `loraport log verify`.
    """
    from loraport.admin import AdminClient
    from loraport.log.events import anchor_of, verify_chain
    from loraport.log.leaf import parse_leaf

    path = memory or data / "state" / "audit-chain.json"
    with AdminClient.local(data) as admin:
        # The log first: what it names was written by then.
        leaves = [parse_leaf(leaf.body) for leaf in admin.list_leaves()]
        events = [(_event(item), item.hash) for item in admin.list_audit_events()]
    anchors = dict(anchor for leaf in leaves if (anchor := anchor_of(leaf)) is not None)
    chain = verify_chain(reversed(events), seen=_seen(path), anchors=anchors)
    if as_json:
        print_json({"good": not chain.fault, "events": chain.count, "hash": chain.last.hex(), "fault": chain.fault})
    elif chain.fault:
        say(f"the audit events are NOT whole: {chain.fault}; the {chain.count} before it are good")
    else:
        say(f"{chain.count} audit events are whole, the last hash is {chain.last.hex()}")
    if chain.fault:
        return 1
    _remember(path, chain.count, chain.last)
    return 0


def _event(item: Any) -> Any:
    from loraport.log.events import Event

    return Event(
        sequence=item.sequence,
        time_us=item.event_time.ToMicroseconds(),
        principal=item.principal,
        method=item.method,
        resource=item.resource,
        decision=item.decision,
        reason=item.reason,
        request_id=item.request_id,
    )


def _seen(path: Path) -> tuple[int, bytes] | None:
    """Returns what the last check accepted; None before the first. Raises ValueError for a file that is not ours."""
    from loraport.bundle.canonical import load_strict

    if not path.exists():
        return None
    value = load_strict(path.read_bytes(), max_bytes=4096, max_depth=1)
    try:
        return int(value["sequence"]), bytes.fromhex(value["hash"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is not what an audit wrote; move it away to begin anew") from None


def _remember(path: Path, count: int, last: bytes) -> None:
    from loraport.bundle.canonical import canonical
    from loraport.dev.credentials import write_private

    if count:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, canonical({"sequence": count, "hash": last.hex()}) + b"\n")


def _row(event: Any) -> dict[str, Any]:
    return {
        "sequence": event.sequence,
        "time": time_text(event, "event_time"),
        "principal": event.principal,
        "method": event.method.rsplit("/", 1)[-1],
        "resource": event.resource,
        "decision": event.decision,
        "reason": event.reason,
        "request_id": event.request_id,
        "hash": event.hash.hex(),
    }
