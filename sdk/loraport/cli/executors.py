"""`loraport executor`: what each executor computes, taking one out of service and putting it back, merged mode."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraport.cli.references import find_revision
from loraport.cli.views import DEFAULT_DATA, Data, Json, OptionalTenant, last_part, note, print_json, print_rows, say

if TYPE_CHECKING:
    from loraport.executor.v1.executor_service_pb2 import StateResponse

app = typer.Typer(help="Executors: what they compute, and which of them serve.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The executor, as in: loraport executor list.")]
COLUMNS = ("executor", "router", "base", "dtype", "decoder", "mode", "running_count", "queued_count", "error")
POLL_S = 0.2


@app.command("list")
def list_executors(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show every executor: whether the router sends it requests, or why not; its base model, decoder and mode.

    One that does not answer is shown with its reason.
    """
    from loraport.presence import PresenceClient

    router = _router_says(data)
    with PresenceClient.local(data) as presence:
        rows = [executor_row(name, state, router.get(name)) for name, state in presence.executors().items()]
    print_rows(rows, as_json=as_json, columns=COLUMNS, empty="no executors")


@app.command("drain")
def drain(
    executor: Name,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait until nothing runs there; exit code 1 if it does.")
    ] = 0.0,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Have the router send an executor no further request. What runs there ends as it would.

    The router remembers it until it is started again; where there are several, each is told.
    """
    _set_drained(executor, True, wait_s=wait, data=data, as_json=as_json)


@app.command("undrain")
def undrain(executor: Name, data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Have the router send requests to an executor again."""
    _set_drained(executor, False, wait_s=0.0, data=data, as_json=as_json)


@app.command("merge")
def merge(
    executor: Name,
    revision: Annotated[str, typer.Argument(help="TENANT/NAME@vN, TENANT/NAME for the newest ACTIVE one, or its id.")],
    tenant: OptionalTenant = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Fold one revision into a dedicated executor's weights. It then serves that revision alone, at the base's cost.

    Waits until nothing runs there; meanwhile new requests are refused. The stack must have been started with
    --dedicated.
    """
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        revision_id = find_revision(admin, revision, tenant=tenant, version=None, state="ACTIVE").revision_id
    _set_mode(executor, revision_id, data=data, as_json=as_json)


@app.command("unmerge")
def unmerge(executor: Name, data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Take the merged revision out again: the weights are the base model's, bit for bit."""
    _set_mode(executor, "", data=data, as_json=as_json)


def executor_row(name: str, state: "StateResponse | Exception", router: str | None) -> dict[str, Any]:
    """Returns one executor as it is shown. What it did not say is null; so is `router` if the router said nothing."""
    known = {"executor": name, "router": router}
    if isinstance(state, Exception):
        return {**known, **dict.fromkeys(COLUMNS[2:-1]), "merged_revision_id": None, "error": str(state)}
    return {
        **known,
        "base": last_part(state.base_model),
        "dtype": state.dtype,
        "decoder": state.decoder,
        "mode": state.mode,
        "running_count": state.running_count,
        "queued_count": state.queued_count,
        "merged_revision_id": state.merged_revision_id or None,
        "error": None,
    }


def _router_says(data: Data) -> dict[str, str]:
    """Returns `serving`, or why it is not, by executor; nothing when the router does not answer."""
    from loraport.admin import AdminClient
    from loraport.errors import LoraportError

    with AdminClient.local(data) as admin:
        try:
            return {found.executor: found.fault or "serving" for found in admin.residency()}
        except LoraportError:
            return {}


def _set_drained(executor: str, drained: bool, *, wait_s: float, data: Data, as_json: bool) -> None:
    from loraport.admin import AdminClient

    until = time.monotonic() + wait_s
    with AdminClient.local(data) as admin:
        found = admin.drain(executor, undrain=not drained)
        while found.running_count and time.monotonic() < until:
            time.sleep(POLL_S)
            found = admin.drain(executor, undrain=not drained)
    if as_json:
        row = {"executor": executor, "serving": found.serving, "running_count": found.running_count}
        print_json(row)
    elif drained:
        say(f"{executor} gets no further request; {found.running_count} still run there")
    else:
        say(
            f"{executor} is in service"
            if found.serving
            else f"{executor} is no longer drained, but out: see executor list"
        )
    if wait_s and found.running_count:
        note(f"after {wait_s:g} s something still runs on {executor}")
        raise typer.Exit(1)


def _set_mode(executor: str, revision_id: str, *, data: Data, as_json: bool) -> None:
    from loraport.presence import PresenceClient

    with PresenceClient.local(data) as presence:
        mode = presence.set_mode(executor, revision_id)
    if as_json:
        print_json({"executor": executor, "mode": mode.mode, "merged_revision_id": mode.revision_id or None})
    else:
        say(f"{executor} is in {mode.mode} mode" + (f" for {mode.revision_id}" if mode.revision_id else ""))
