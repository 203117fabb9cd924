"""`loraport executor`: what each executor computes, and merged mode."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraport.cli.references import find_revision
from loraport.cli.views import DEFAULT_DATA, Data, Json, OptionalTenant, last_part, print_json, print_rows, say

if TYPE_CHECKING:
    from loraport.executor.v1.executor_service_pb2 import StateResponse

app = typer.Typer(help="Executors: their decoders and modes.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The executor, as in: loraport executor list.")]
COLUMNS = ("executor", "base", "dtype", "decoder", "mode", "running_count", "queued_count", "error")


@app.command("list")
def list_executors(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show every executor's base model, decoder and mode. One that does not answer is shown with its reason."""
    from loraport.presence import PresenceClient

    with PresenceClient.local(data) as presence:
        rows = [executor_row(name, state) for name, state in presence.executors().items()]
    print_rows(rows, as_json=as_json, columns=COLUMNS, empty="no executors")


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


def executor_row(name: str, state: "StateResponse | Exception") -> dict[str, Any]:
    """Returns one executor as it is shown; all but `executor` and `error` are null when it did not answer."""
    if isinstance(state, Exception):
        return {"executor": name, **dict.fromkeys(COLUMNS[1:-1]), "merged_revision_id": None, "error": str(state)}
    return {
        "executor": name,
        "base": last_part(state.base_model),
        "dtype": state.dtype,
        "decoder": state.decoder,
        "mode": state.mode,
        "running_count": state.running_count,
        "queued_count": state.queued_count,
        "merged_revision_id": state.merged_revision_id or None,
        "error": None,
    }


def _set_mode(executor: str, revision_id: str, *, data: Data, as_json: bool) -> None:
    from loraport.presence import PresenceClient

    with PresenceClient.local(data) as presence:
        mode = presence.set_mode(executor, revision_id)
    if as_json:
        print_json({"executor": executor, "mode": mode.mode, "merged_revision_id": mode.revision_id or None})
    else:
        say(f"{executor} is in {mode.mode} mode" + (f" for {mode.revision_id}" if mode.revision_id else ""))
