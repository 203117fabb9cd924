"""`loraport alias`: mutable pointers from an adapter to one revision."""

from typing import Annotated, Any

import typer

from loraport.cli.adapters import Version, adapter_row
from loraport.cli.references import find_revision, parse_reference
from loraport.cli.views import DEFAULT_DATA, Data, Json, OptionalTenant, last_part, print_json, print_rows, say

app = typer.Typer(help="Aliases, such as prod: which revision of an adapter answers.", no_args_is_help=True)

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="NAME with --tenant, or TENANT/NAME.")]
Alias = Annotated[str, typer.Argument(metavar="ALIAS", help="Id of the alias, e.g. prod.")]


@app.command("set")
def set_alias(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="NAME with --tenant, TENANT/NAME, TENANT/NAME@vN.")],
    alias: Alias,
    revision: Annotated[
        str | None, typer.Option("--revision", help="sha256:…; default: --version, or the newest ACTIVE one.")
    ] = None,
    version: Version = None,
    tenant: OptionalTenant = None,
    now: Annotated[
        bool, typer.Option("--now", help="Move one that serves, unjudged, once every executor has the revision.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --now: wait for no executor.")] = False,
    reason: Annotated[str, typer.Option(help="Why, with --now; kept in the audit log.")] = "",
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Create an alias, or move one."""
    from loraport.admin import AdminClient

    reference = parse_reference(adapter, tenant=tenant, version=version)
    with AdminClient.local(data) as admin:
        target = revision
        if target is None:
            found = find_revision(admin, adapter, tenant=tenant, version=version, state="ACTIVE")
            target = found.revision_id
        moved = admin.set_alias(reference.tenant, reference.adapter, alias, target, now=now, reason=reason, force=force)
    _tell(moved, as_json, f"→ v{moved.version} {moved.revision_id}")


@app.command("list")
def list_aliases(
    adapter: Adapter, tenant: OptionalTenant = None, data: Data = DEFAULT_DATA, as_json: Json = False
) -> None:
    """List an adapter's aliases."""
    from loraport.admin import AdminClient

    reference = parse_reference(adapter, tenant=tenant)
    with AdminClient.local(data) as admin:
        rows = adapter_row(admin.get_adapter(reference.tenant, reference.adapter))["aliases"]
    columns = ("alias", "version", "revision_id")
    print_rows(rows, as_json=as_json, columns=columns, empty="no aliases; see: loraport alias set --help")


@app.command("delete")
def delete_alias(
    adapter: Adapter, alias: Alias, tenant: OptionalTenant = None, data: Data = DEFAULT_DATA, as_json: Json = False
) -> None:
    """Remove an alias; the revision stays."""
    from loraport.admin import AdminClient

    reference = parse_reference(adapter, tenant=tenant)
    with AdminClient.local(data) as admin:
        removed = admin.delete_alias(reference.tenant, reference.adapter, alias)
    _tell(removed, as_json, "is removed")


def _tell(alias: Any, as_json: bool, what: str) -> None:
    _, tenant, _, adapter, _, _ = alias.name.split("/")
    row = {
        "tenant": tenant,
        "adapter": adapter,
        "alias": last_part(alias.name),
        "revision_id": alias.revision_id,
        "version": alias.version,
    }
    if as_json:
        print_json(row)
    else:
        say(f"alias {row['alias']} of {tenant}/{adapter} {what}")
