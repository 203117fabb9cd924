"""`loraport adapter`: verify, register, show, approve, revoke."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from loraport.bundle.verdict import Limits
from loraport.cli.presence import local_presence, presence_row, print_presence
from loraport.cli.references import find_revision, is_revision_id, parse_reference
from loraport.cli.views import (
    DEFAULT_DATA,
    Data,
    Json,
    OptionalTenant,
    Tenant,
    last_part,
    print_json,
    print_reasons,
    print_rows,
    reasons,
    say,
    time_text,
)

app = typer.Typer(help="Adapters and their revisions.", no_args_is_help=True)

# Not judged by the parser: what cannot be read is a refusal like any other, with the same exit code.
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", readable=False, help="Holds adapter_config.json and adapter_model.safetensors.")
]
Name = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="NAME with --tenant, TENANT/NAME, TENANT/NAME@vN, or sha256:…")
]
Version = Annotated[int | None, typer.Option("--version", help="The publisher's number.", min=1)]

# What `register` and `import` ask alike.
NewName = Annotated[str, typer.Option("--name", "-n", help="Id of the adapter; made when it is new.")]
BaseName = Annotated[str, typer.Option("--base", "-b", help="Id of the base model, as in: loraport base list.")]
NewVersion = Annotated[
    int | None, typer.Option("--version", min=1, help="Rises with every revision. Default: the next.")
]
Approve = Annotated[bool, typer.Option("--approve", help="Let it serve once it is verified.")]
NewAlias = Annotated[str | None, typer.Option("--alias", help="Point this alias at it; needs --approve.")]
Signer = Annotated[str | None, typer.Option("--signer", help="Whose key signs. Default: the only one.")]
Notes = Annotated[str, typer.Option("--notes", help="Free text for the manifest.")]


@app.command("verify")
def verify(
    directory: Directory,
    base: Annotated[Path, typer.Option("--base", readable=False, help="Directory of the base model.")],
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Whose it would be; part of the id.")] = "local",
    max_update_norm: Annotated[
        float, typer.Option(min=0, help="Largest norm of a module's update, as the loader's operator set it; 0: none.")
    ] = Limits().max_update_norm,
    data: Annotated[Path, typer.Option(hidden=True, help="Not needed here; taken as everywhere.")] = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Check a bundle against a base model, offline: every reason, the resolved modules, the revision id.

    Exit code 0 when it would be admitted, 1 when it would be refused.
    """
    from loraport.bundle.base_dir import read_base_dir
    from loraport.bundle.bundle_dir import verify_dir

    limits = Limits(max_update_norm=max_update_norm or math.inf)
    verdict = verify_dir(directory, base=read_base_dir(base), tenant=tenant, limits=limits)
    if as_json:
        print_json(
            {
                "verdict": "admit" if verdict.admitted else "refuse",
                "reasons": reasons(verdict.violations),
                "warnings": reasons(verdict.warnings),
                "revision_id": verdict.revision_id,
                "modules": [
                    {
                        "path": module.path,
                        "rank": module.rank,
                        "alpha": _number(module.alpha),
                        "scaling": module.scaling,
                    }
                    for module in verdict.modules
                ],
                "tenant": tenant,
                "dtype": verdict.dtype,
                "weights_digest": verdict.weights_digest,
                "max_update_norm": max_update_norm or None,
            }
        )
    else:
        _show_verdict(verdict, tenant)
        say(f"  limit of a module's update norm: {f'{max_update_norm:.6g}' if max_update_norm else 'none'}")
    raise typer.Exit(0 if verdict.admitted else 1)


def _show_verdict(verdict: Any, tenant: str) -> None:
    if verdict.admitted:
        ranks = sorted({module.rank for module in verdict.modules})
        say(f"admit: {len(verdict.modules)} modules, rank {', '.join(map(str, ranks))}, {verdict.dtype}")
        say(f"  revision id (for tenant {tenant}) {verdict.revision_id}")
    else:
        say(f"refuse: {len(verdict.violations)} " + ("reason" if len(verdict.violations) == 1 else "reasons"))
    print_reasons("refused by", verdict.violations)
    print_reasons("warning", verdict.warnings)


@app.command("register")
def register(
    directory: Directory,
    tenant: Tenant,
    name: NewName,
    base: BaseName,
    version: NewVersion = None,
    approve: Approve = False,
    alias: NewAlias = None,
    signer: Signer = None,
    notes: Notes = "",
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Verify a bundle, sign it, register it and send it.

    Exit code 1 when it is refused here, or quarantined by the loader; the reasons are listed.
    """
    from loraport.admin import AdminClient
    from loraport.publish import publish

    check_alias(alias, approve)
    with AdminClient.local(data) as admin:
        key = find_signer(data, tenant, signer)
        result = publish(
            admin,
            directory,
            tenant=tenant,
            adapter=name,
            base=base,
            signer=key,
            version=version,
            approve=approve,
            alias=alias,
            notes=notes,
        )
    tell_publication(result, tenant, name, as_json)


def check_alias(alias: str | None, approve: bool) -> None:
    """Refuses an alias for a revision that would not serve."""
    if alias is not None and not approve:
        raise typer.BadParameter("--alias needs --approve: an alias points only at a revision that may serve")


def tell_publication(result: Any, tenant: str, name: str, as_json: bool) -> None:
    """Shows what became of a bundle and ends with the exit code for it."""
    if as_json:
        print_json(
            {
                "revision_id": result.revision_id,
                "state": result.state,
                "version": result.version,
                "reasons": reasons(result.reasons),
                "warnings": reasons(result.warnings),
            }
        )
    else:
        what = f" {result.revision_id}" if result.revision_id else ""
        say(f"{tenant}/{name}@v{result.version} is {result.state}{what}")
        print_reasons("refused by", result.reasons)
        print_reasons("warning", result.warnings)
    raise typer.Exit(0 if result.accepted else 1)


def find_signer(data: Path, tenant: str, signer: str | None) -> Any:
    """Returns the signing key of a tenant: the one named, or the only one there is; several for `A,B`.

    Raises:
        LoraportError: there is none, or several.
    """
    from loraport.bundle.envelope import SigningKey
    from loraport.dev.layout import Layout
    from loraport.errors import FailedPreconditionError, NotFoundError

    folder = Layout.at(data).signer_key(tenant, "any").parent
    names = sorted(path.stem for path in folder.glob("*.key"))
    if signer is not None and "," in signer:
        return [find_signer(data, tenant, part) for part in signer.split(",")]
    if signer is None and len(names) > 1:
        raise FailedPreconditionError(f"{tenant} has several signers, choose one with --signer: {', '.join(names)}")
    chosen = signer or (names[0] if names else None)
    if chosen is None or chosen not in names:
        which = f"no signing key {chosen}" if chosen else "no signing key"
        command = f"loraport signer create --tenant {tenant} {signer or ''}".rstrip()
        raise NotFoundError(f"{which} of {tenant} in {folder}; make one with: {command}")
    return SigningKey.load(folder / f"{chosen}.key")


@app.command("list")
def list_adapters(tenant: OptionalTenant = None, data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """List adapters, of one tenant or of all."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        rows = [adapter_row(adapter) for adapter in admin.list_adapters(tenant)]
    for row in rows:
        row["points"] = [f"{alias['alias']} → v{alias['version']}" for alias in row["aliases"]]
    if as_json:
        rows = [{key: value for key, value in row.items() if key != "points"} for row in rows]
    columns = ("tenant", "adapter", "base", "latest_version", "points")
    print_rows(rows, as_json=as_json, columns=columns, empty="no adapters; see: loraport adapter register --help")


@app.command("show")
def show(
    adapter: Name,
    tenant: OptionalTenant = None,
    version: Version = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Show an adapter with its aliases and revisions, or one revision and where it is, stage by stage."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        if is_revision_id(adapter) or parse_reference(adapter, tenant=tenant, version=version).version is not None:
            _show_revision(find_revision(admin, adapter, tenant=tenant, version=version), data, as_json)
            return
        reference = parse_reference(adapter, tenant=tenant)
        found = adapter_row(admin.get_adapter(reference.tenant, reference.adapter))
        revisions = [revision_row(item) for item in admin.list_revisions(reference.tenant, reference.adapter)]
    if as_json:
        print_json({**found, "revisions": revisions})
        return
    say(f"{found['tenant']}/{found['adapter']} on base model {found['base']}")
    for alias in found["aliases"]:
        say(f"  alias {alias['alias']} → v{alias['version']} {alias['revision_id']}")
    columns = ("version", "state", "revision_id", "max_rank", "module_count", "size_bytes", "update_time")
    print_rows(revisions, as_json=False, columns=columns, empty="no revisions")
    for revision in revisions:
        for item in revision["reasons"]:
            say(f"  v{revision['version']} {item['code']}: {item['detail']}")


def _show_revision(revision: Any, data: Path, as_json: bool) -> None:
    row = revision_row(revision)
    with local_presence(data) as presence:
        where = presence_row(presence, row["revision_id"], row["weights_digest"], row["base"])
    if as_json:
        print_json({**row, **where})
        return
    for key, value in row.items():
        if key not in ("reasons", "warnings"):
            say(f"{key.replace('_', ' '):>15}  {'-' if value is None else value}")
    print_reasons("reason", revision.reasons)
    print_reasons("warning", revision.warnings)
    print_presence(where)


@app.command("approve")
def approve(
    adapter: Name,
    tenant: OptionalTenant = None,
    version: Version = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Let a verified revision serve. Without a version: the newest."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        found = find_revision(admin, adapter, tenant=tenant, version=version)
        _tell(admin.approve_revision(found.revision_id), as_json)


@app.command("revoke")
def revoke(
    adapter: Name,
    tenant: OptionalTenant = None,
    version: Version = None,
    reason: Annotated[str, typer.Option(help="Why; kept in the audit log.")] = "revoked by an operator",
    security: Annotated[
        bool, typer.Option("--security", help="Even if a rollout needs it: that one rolls back first.")
    ] = False,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Take a revision out of service for ever. Name it by its id or its version."""
    from loraport.admin import AdminClient

    if not is_revision_id(adapter) and parse_reference(adapter, tenant=tenant, version=version).version is None:
        raise typer.BadParameter("say which revision: --version N, TENANT/NAME@vN or sha256:…")
    with AdminClient.local(data) as admin:
        found = find_revision(admin, adapter, tenant=tenant, version=version)
        _tell(admin.revoke_revision(found.revision_id, reason=reason, security=security), as_json)


def _tell(revision: Any, as_json: bool) -> None:
    row = revision_row(revision)
    if as_json:
        print_json(row)
    else:
        say(f"{row['tenant']}/{row['adapter']}@v{row['version']} is {row['state']} {row['revision_id']}")


def adapter_row(adapter: Any) -> dict[str, Any]:
    """Returns an adapter as a JSON object."""
    _, tenant, _, name = adapter.name.split("/")
    return {
        "tenant": tenant,
        "adapter": name,
        "name": adapter.name,
        "base": last_part(adapter.base_model),
        "latest_version": adapter.latest_version,
        "aliases": [
            {"alias": last_part(alias.name), "revision_id": alias.revision_id, "version": alias.version}
            for alias in adapter.aliases
        ],
        "shared_tenants": [last_part(tenant) for tenant in adapter.shared_tenants],
        "create_time": time_text(adapter, "create_time"),
    }


def revision_row(revision: Any) -> dict[str, Any]:
    """Returns a revision as a JSON object."""
    from loraport.publish import state_name

    _, tenant, _, adapter, _, _ = revision.name.split("/")
    return {
        "revision_id": revision.revision_id,
        "tenant": tenant,
        "adapter": adapter,
        "version": revision.version,
        "state": state_name(revision),
        "base": last_part(revision.base_model),
        "weights_digest": revision.weights_digest,
        "size_bytes": revision.size_bytes,
        "max_rank": revision.max_rank,
        "module_count": revision.module_count,
        "create_time": time_text(revision, "create_time"),
        "update_time": time_text(revision, "update_time"),
        "reasons": reasons(revision.reasons),
        "warnings": reasons(revision.warnings),
    }


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
