"""`loraport adapter share`: who may use an adapter besides its owner."""

from typing import Annotated

import typer

from loraport.cli.adapters import adapter_row
from loraport.cli.references import parse_reference
from loraport.cli.views import DEFAULT_DATA, Data, Json, OptionalTenant, print_json, say, wrong_use


def share_adapter(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="NAME with --tenant, or TENANT/NAME.")],
    tenant: OptionalTenant = None,
    others: Annotated[
        list[str] | None, typer.Option("--with", metavar="TENANT", help="A tenant that may use it; may be repeated.")
    ] = None,
    nobody: Annotated[bool, typer.Option("--nobody", help="Take it back from everybody else.")] = False,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Let other tenants use an adapter: exactly those named, whoever was named before."""
    from loraport.admin import AdminClient

    if nobody == bool(others):
        raise wrong_use("say with whom: --with TENANT (again for each), or --nobody")
    reference = parse_reference(adapter, tenant=tenant)
    if reference.version is not None:
        raise wrong_use("an adapter is shared as a whole; leave the version out")
    with AdminClient.local(data) as admin:
        row = adapter_row(admin.share_adapter(reference.tenant, reference.adapter, others or ()))
    if as_json:
        print_json(row)
        return
    shared = ", ".join(row["shared_tenants"])
    how = f"shared with {shared}: they ask for {row['name']}" if shared else "its owner's alone"
    say(f"{row['tenant']}/{row['adapter']} is {how}")
