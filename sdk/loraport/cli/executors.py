"""`loraport executor`: what each executor computes, taking one out of service and putting it back, merged mode."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraport.cli.references import find_revision
from loraport.cli.views import DEFAULT_DATA, Data, Json, OptionalTenant, last_part, note, print_json, print_rows, say
from loraport.values import DRAINING

if TYPE_CHECKING:
    from loraport.admin import AdminClient
    from loraport.executor.v1.executor_service_pb2 import StateResponse
    from loraport.presence import PresenceClient

app = typer.Typer(help="Executors: what they compute, and which of them serve.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The executor, as in: loraport executor list.")]
COLUMNS = ("executor", "router", "base", "dtype", "decoder", "mode", "running_count", "queued_count", "error")
POLL_S = 0.2
# A router asks an executor that is out more often than this.
HEARS_WITHIN_S = 5.0


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
    """Have no router send an executor a further request. What runs there ends as it would.

    The router is told, and the executor itself, from which every other router hears it. It remembers until it is
    started again, the router until that is or until `undrain`.
    """
    from loraport.admin import AdminClient
    from loraport.presence import PresenceClient

    with AdminClient.local(data) as admin, PresenceClient.local(data) as presence:
        running, fault = admin.drain(executor).running_count, ""
        untold = _told(presence, executor, undrain=False)
        if not untold:
            running, fault = _watched(presence, executor, running, until_s=time.monotonic() + wait)
    if as_json:
        print_json({"executor": executor, "serving": False, "running_count": running, "executor_told": not untold})
    else:
        say(f"{executor} gets no further request; {running} still run there")
    if untold:
        note(f"only this router knows: {executor} itself was not told ({untold})")
    elif fault:
        note(fault)
    elif wait and running:
        note(f"after {wait:g} s something still runs on {executor}")
    if wait and (untold or fault or running):
        raise typer.Exit(1)


@app.command("undrain")
def undrain(executor: Name, data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Have all routers send requests to an executor again."""
    from loraport.admin import AdminClient
    from loraport.presence import PresenceClient

    with AdminClient.local(data) as admin, PresenceClient.local(data) as presence:
        untold = _told(presence, executor, undrain=True)
        serving, ends = admin.drain(executor, undrain=True).serving, time.monotonic() + HEARS_WITHIN_S
        # The router hears of it with its next look at the executor.
        while not serving and _fault(admin, executor) == DRAINING and time.monotonic() < ends:
            time.sleep(POLL_S)
        serving = serving or not _fault(admin, executor)
    if as_json:
        print_json({"executor": executor, "serving": serving, "executor_told": not untold})
    elif serving:
        say(f"{executor} is in service")
    else:
        say(f"{executor} is no longer drained, but out: see executor list")
    if untold:
        note(f"{executor} itself was not told ({untold})")


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


def _told(presence: "PresenceClient", executor: str, *, undrain: bool) -> str:
    """Tells an executor; returns why that was in vain, empty when it was not."""
    from loraport.errors import LoraportError

    try:
        presence.drain(executor, undrain=undrain)
    except LoraportError as error:
        return str(error)
    return ""


def _fault(admin: "AdminClient", executor: str) -> str:
    """Returns why the router sends an executor nothing, empty when it does."""
    return next((row.fault for row in admin.residency() if row.executor == executor), "")


def _watched(presence: "PresenceClient", executor: str, running: int, *, until_s: float) -> tuple[int, str]:
    """Looks, and changes nothing, until nothing runs on a drained executor; says on the way how many requests do.

    Returns how many run at the end, and what came in between, empty when nothing did.
    """
    from loraport.errors import LoraportError

    said = 0
    while True:
        try:
            state = presence.executor(executor)
        except LoraportError as error:
            return running, f"{executor} does not answer any more ({error})"
        running = state.running_count + state.queued_count
        if state.state == "SERVING":
            return running, f"somebody put {executor} back into service"
        if running and running != said:
            note(f"{running} still run on {executor}")
            said = running
        if not running or time.monotonic() >= until_s:
            return running, ""
        time.sleep(POLL_S)


def _set_mode(executor: str, revision_id: str, *, data: Data, as_json: bool) -> None:
    from loraport.presence import PresenceClient

    with PresenceClient.local(data) as presence:
        mode = presence.set_mode(executor, revision_id)
    if as_json:
        print_json({"executor": executor, "mode": mode.mode, "merged_revision_id": mode.revision_id or None})
    else:
        say(f"{executor} is in {mode.mode} mode" + (f" for {mode.revision_id}" if mode.revision_id else ""))
