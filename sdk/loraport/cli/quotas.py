"""`loraport tenant show`, `loraport tenant set-quota`, `loraport key rotate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from loraport.cli.views import (
    DEFAULT_DATA,
    Data,
    Json,
    Tenant,
    last_part,
    note,
    print_json,
    print_rows,
    say,
    time_text,
    wrong_use,
)

QUOTAS = (
    "requests_per_minute",
    "tokens_per_minute",
    "in_flight_count",
    "queued_count",
    "cold_loads_per_minute",
    "adapter_count",
    "stored_bytes",
    "resident_bytes",
)
Name = Annotated[str, typer.Argument(help="Tenant.")]


def show_tenant(name: Name, data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show a tenant, its quotas, and what it has used of them."""
    from loraport.admin import AdminClient
    from loraport.errors import LoraportError

    with AdminClient.local(data) as admin:
        tenant = admin.accounts.get_tenant(name)
        try:
            usage = admin.accounts.quota_usage(name)
        except LoraportError as error:
            note(f"the router does not say what is used: {error}")
            usage = None
    rows = _quota_rows(tenant, usage)
    keys = [] if usage is None else usage.keys
    uses = [{"key": use.key, "last_use_time": time_text(use, "last_use_time")} for use in keys]
    if as_json:
        print_json(
            {
                "tenant": last_part(tenant.name),
                "name": tenant.name,
                "display_name": tenant.display_name,
                "weight": tenant.weight,
                "base_allowed": tenant.base_allowed,
                "create_time": time_text(tenant, "create_time"),
                "router_count": usage.router_count if usage else None,
                "shared": usage.shared if usage else None,
                "quotas": rows,
                "keys": uses,
            }
        )
        return
    base = "may use base models" if tenant.base_allowed else "may not use base models"
    say(f"tenant {last_part(tenant.name)}, weight {tenant.weight:g}, {base}")
    print_rows(rows, as_json=False, columns=("quota", "limit", "used", "total", "refused_count"), empty="")
    if usage is not None and usage.router_count > 1:
        say(f"{usage.router_count} routers share the quotas" + ("" if usage.shared else ", each keeps to its part"))
    print_rows(
        uses, as_json=False, columns=("key", "last_use_time"), empty="no API key was used since the router started"
    )


def set_quota(
    name: Name,
    requests_per_minute: Annotated[int | None, typer.Option(min=0, help="Calls a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=0, help="Prompt and answer tokens a minute.")] = None,
    in_flight_count: Annotated[int | None, typer.Option(min=0, help="Calls at a time.")] = None,
    queued_count: Annotated[int | None, typer.Option(min=0, help="Calls that wait for their first token.")] = None,
    cold_loads_per_minute: Annotated[int | None, typer.Option(min=0, help="Adapter loads a minute.")] = None,
    adapter_count: Annotated[int | None, typer.Option(min=0, help="Adapters.")] = None,
    stored_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes of kept weights.")] = None,
    resident_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes of adapters in use at a time.")] = None,
    unlimited: Annotated[list[str] | None, typer.Option(help="Name of a quota to take away; `all` for all.")] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Set quotas of a tenant; those that are not named stay as they are."""
    from loraport.admin import AdminClient

    given = locals()
    wanted = {quota: given[quota] for quota in QUOTAS if given[quota] is not None}
    removed = {name.replace("-", "_") for name in unlimited or ()}
    unknown = removed - {*QUOTAS, "all"}
    if unknown:
        raise wrong_use(f"there is no quota {min(unknown)}; there are: {', '.join(QUOTAS)}")
    if not wanted and not removed:
        raise wrong_use("name a quota, e.g. --requests-per-minute 600")
    with AdminClient.local(data) as admin:
        kept = {} if "all" in removed else _limits(admin.accounts.get_tenant(name))
        limits = {quota: limit for quota, limit in (kept | wanted).items() if quota in wanted or quota not in removed}
        tenant = admin.accounts.set_quota(name, **limits)
    if as_json:
        print_json({"tenant": last_part(tenant.name), "quota": _limits(tenant)})
        return
    text = ", ".join(f"{quota} {limit}" for quota, limit in _limits(tenant).items())
    say(f"tenant {last_part(tenant.name)}: {text or 'no quotas'}")


def rotate_key(
    key: Annotated[str, typer.Argument(help="Key id, as listed.")],
    tenant: Tenant,
    overlap_hours: Annotated[float, typer.Option(min=0, max=720, help="How long the old key still opens.")] = 24.0,
    out: Annotated[
        Path | None, typer.Option(help="File for the secret. Default: keys/TENANT.key in the data directory.")
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Replace an API key: a new secret with the same rights; the old one ends after the overlap."""
    from loraport.admin import AdminClient
    from loraport.dev.credentials import write_private
    from loraport.dev.layout import Layout

    with AdminClient.local(data) as admin:
        path = out or Layout.at(data).api_key(tenant)
        done = admin.accounts.rotate_api_key(tenant, last_part(key), overlap_s=round(overlap_hours * 3600))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, f"{done.secret}\n".encode())
    ends = time_text(done.replaced, "expire_time")
    if as_json:
        names = {"key": last_part(done.api_key.name), "replaced": last_part(done.replaced.name)}
        print_json({**names, "replaced_expire_time": ends, "secret": done.secret, "path": str(path)})
        return
    say(f"API key {last_part(done.api_key.name)} of {tenant} created; its secret is in {path}")
    say(f"{last_part(done.replaced.name)} ends at {ends}")


def _limits(tenant: Any) -> dict[str, int]:
    return {quota: getattr(tenant.quota, quota) for quota in QUOTAS if tenant.quota.HasField(quota)}


def _quota_rows(tenant: Any, usage: Any | None) -> list[dict[str, Any]]:
    """One row per quota, whoever keeps it; what a router says of its limit is not asked, the registry decides."""
    limits = _limits(tenant)
    lines = {line.quota: line for line in usage.quotas} if usage is not None else {}
    rows = []
    for quota in QUOTAS:
        line = lines.get(quota)
        kept = getattr(tenant.usage, quota) if quota in ("adapter_count", "stored_bytes") else None
        rows.append(
            {
                "quota": quota,
                "limit": limits.get(quota),
                "used": line.used if line is not None else kept,
                "total": line.total if line is not None else None,
                "refused_count": line.refused_count if line is not None else None,
            }
        )
    return rows
