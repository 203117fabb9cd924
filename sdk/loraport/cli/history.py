"""`loraport adapter history`: what became of an adapter, as a story; made from the audit events, oldest first."""

from typing import Annotated, Any

import typer

from loraport.cli.references import parse_reference
from loraport.cli.views import DEFAULT_DATA, Data, Json, OptionalTenant, last_part, print_json, say, time_text

# Method of a service: what it does to a revision, an alias or the adapter itself.
_TOLD = {
    "RegisterRevision": "announced",
    "AdmitRevision": "checked by the loader",
    "ApproveRevision": "approved",
    "RevokeRevision": "revoked",
    "SetAlias": "set",
    "DeleteAlias": "removed",
    "ShareAdapter": "shared",
    "stop": "stopped",
}


def history(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="NAME with --tenant, or TENANT/NAME.")],
    tenant: OptionalTenant = None,
    refused: Annotated[bool, typer.Option("--refused", help="Also what was asked for and refused.")] = False,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Tell what became of an adapter: its revisions, aliases and rollouts, oldest first, by whom and why."""
    from loraport.admin import AdminClient

    reference = parse_reference(adapter, tenant=tenant)
    name = f"tenants/{reference.tenant}/adapters/{reference.adapter}"
    with AdminClient.local(data) as admin:
        admin.get_adapter(reference.tenant, reference.adapter)
        ids = {
            item.revision_id: f"v{item.version}" for item in admin.list_revisions(reference.tenant, reference.adapter)
        }
        events = [event for event in admin.list_audit_events(reference.tenant) if _of(event.resource, name)]
    events = [event for event in reversed(events) if refused or event.decision == "allowed"]
    rows = [history_row(event, ids) for event in events]
    if as_json:
        print_json(rows)
        return
    if not rows:
        say("nothing is told of it")
    for row in rows:
        say(f"{row['time']}  {row['what']}" + (f"  [{row['who']}]" if row["who"] != "registry" else ""))


def history_row(event: Any, versions: dict[str, str]) -> dict[str, Any]:
    """Returns an audit event as a line of the story; `versions` maps revision ids to `v<n>`."""
    method = last_part(event.method)
    subject = _subject(event.resource)
    if event.decision != "allowed":
        what = f"{subject}: {method} was refused, {event.reason}"
    elif "/rollouts/" in event.resource:
        what = f"{subject}: {event.reason or method}"
    else:
        what = f"{subject} is {_TOLD.get(method, method)}" + (f": {event.reason}" if event.reason else "")
    for revision_id, version in versions.items():
        what = what.replace(revision_id, version)
    return {
        "time": time_text(event, "event_time"),
        "what": what,
        "who": event.principal.removeprefix("spiffe://loraport.local/"),
        "resource": event.resource,
        "method": event.method,
        "decision": event.decision,
        "reason": event.reason,
    }


def _of(resource: str, name: str) -> bool:
    return resource == name or resource.startswith(f"{name}/")


def _subject(resource: str) -> str:
    parts = resource.split("/")
    if len(parts) < 6:
        return "the adapter"
    kind = {"revisions": "", "aliases": "alias ", "rollouts": "rollout "}.get(parts[4], f"{parts[4]} ")
    return f"{kind}{parts[5]}"
