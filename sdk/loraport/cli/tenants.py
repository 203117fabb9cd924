"""`loraport tenant`, `loraport key`: who may do what."""

from pathlib import Path
from typing import Annotated, Any

import typer

from loraport.cli.views import (
    DEFAULT_DATA,
    Data,
    Json,
    OptionalTenant,
    Tenant,
    last_part,
    note,
    print_json,
    print_rows,
    say,
    time_text,
    wrong_use,
)

tenant_app = typer.Typer(help="Tenants: the unit of isolation, fairness and billing.", no_args_is_help=True)
key_app = typer.Typer(help="API keys, with which a tenant's users call the router.", no_args_is_help=True)

Owner = Annotated[str | None, typer.Argument(metavar="TENANT", help="Tenant; --tenant says the same.")]


def owner_of(argument: str | None, option: str | None) -> str:
    """Returns the tenant, given either way."""
    if argument is None and option is None:
        raise wrong_use("say whose: TENANT, or --tenant TENANT")
    if None not in (argument, option) and argument != option:
        raise wrong_use(f"{argument} or {option}? Name one tenant")
    return argument or option or ""


@tenant_app.command("create")
def create_tenant(
    name: Annotated[str, typer.Argument(help="Id: lower-case letters, digits, hyphens.")],
    display_name: Annotated[str, typer.Option(help="Free text for people.")] = "",
    weight: Annotated[float | None, typer.Option(help="Share of the fleet under contention. Default 1.")] = None,
    base_allowed: Annotated[bool, typer.Option(help="May use base models without an adapter.")] = True,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Create a tenant."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        tenant = admin.create_tenant(name, display_name=display_name, weight=weight, base_allowed=base_allowed)
    if as_json:
        print_json(_tenant_row(tenant))
    else:
        say(f"tenant {last_part(tenant.name)} created; next: loraport key create --tenant {last_part(tenant.name)}")


@tenant_app.command("list")
def list_tenants(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """List tenants."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        rows = [_tenant_row(tenant) for tenant in admin.list_tenants()]
    columns = ("tenant", "display_name", "weight", "base_allowed", "create_time")
    print_rows(rows, as_json=as_json, columns=columns, empty="no tenants; make one with: loraport tenant create NAME")


@key_app.command("create")
def create_key(
    owner: Owner = None,
    tenant: OptionalTenant = None,
    scope: Annotated[list[str] | None, typer.Option(help="What it may do: generate, list. Default: all.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the secret. Default: keys/TENANT.key in the data directory.")
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Create an API key and keep its secret in a file that only you can read."""
    from loraport.admin import AdminClient
    from loraport.dev.credentials import write_private
    from loraport.dev.layout import Layout

    tenant = owner_of(owner, tenant)
    with AdminClient.local(data) as admin:
        path = out or Layout.at(data).api_key(tenant)
        key, secret = admin.create_api_key(tenant, scopes=scope or ())
        replaced = path.exists()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, f"{secret}\n".encode())
    if as_json:
        print_json({**_key_row(key), "secret": secret, "path": str(path)})
        return
    say(f"API key {last_part(key.name)} of {tenant} created; its secret is in {path}")
    if replaced:
        note("the file held an earlier key's secret, which stays valid until it is revoked: loraport key revoke")


@key_app.command("list")
def list_keys(
    owner: Owner = None, tenant: OptionalTenant = None, data: Data = DEFAULT_DATA, as_json: Json = False
) -> None:
    """List a tenant's API keys, without secrets."""
    from loraport.admin import AdminClient

    tenant = owner_of(owner, tenant)
    with AdminClient.local(data) as admin:
        rows = [_key_row(key) for key in admin.list_api_keys(tenant)]
    columns = ("key", "scopes", "create_time", "expire_time", "revoke_time")
    empty = f"no API keys; make one with: loraport key create --tenant {tenant}"
    print_rows(rows, as_json=as_json, columns=columns, empty=empty)


@key_app.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(help="Key id, as listed.")],
    tenant: Tenant,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Make an API key useless for ever."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        revoked = admin.revoke_api_key(tenant, last_part(key))
    if as_json:
        print_json(_key_row(revoked))
    else:
        say(f"API key {last_part(revoked.name)} of {tenant} is revoked")


def _tenant_row(tenant: Any) -> dict[str, Any]:
    return {
        "tenant": last_part(tenant.name),
        "name": tenant.name,
        "display_name": tenant.display_name,
        "weight": tenant.weight,
        "base_allowed": tenant.base_allowed,
        "create_time": time_text(tenant, "create_time"),
    }


def _key_row(key: Any) -> dict[str, Any]:
    return {
        "key": last_part(key.name),
        "name": key.name,
        "scopes": list(key.scopes),
        "create_time": time_text(key, "create_time"),
        "expire_time": time_text(key, "expire_time"),
        "revoke_time": time_text(key, "revoke_time"),
    }
