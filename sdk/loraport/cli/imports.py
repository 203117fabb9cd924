"""`loraport adapter import`: publish a bundle that the loader fetches itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraport.cli.adapters import (
    Approve,
    BaseName,
    NewAlias,
    NewName,
    NewVersion,
    Notes,
    Signer,
    check_alias,
    find_signer,
    tell_publication,
)
from loraport.cli.views import DEFAULT_DATA, Data, Json, Tenant, note

if TYPE_CHECKING:
    from loraport.sources import Source


def import_adapter(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", readable=False, help="Your copy of the same two files: what is signed is derived from it."
        ),
    ],
    tenant: Tenant,
    name: NewName,
    base: BaseName,
    hub: Annotated[str | None, typer.Option("--hub", metavar="OWNER/REPO@COMMIT", help="A pinned hub commit.")] = None,
    s3: Annotated[
        str | None,
        typer.Option("--s3", metavar="ENDPOINT/BUCKET/CONFIG_KEY,WEIGHTS_KEY", help="Two objects by exact keys."),
    ] = None,
    https: Annotated[
        tuple[str, str] | None, typer.Option("--https", metavar="CONFIG_URL WEIGHTS_URL", help="Two https addresses.")
    ] = None,
    version: NewVersion = None,
    approve: Approve = False,
    alias: NewAlias = None,
    signer: Signer = None,
    notes: Notes = "",
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Verify and sign a bundle here, and have the loader fetch the same bytes from a source.

    Nothing is uploaded. A manifest is signed over bytes that the publisher has seen, so DIR must hold them; the loader
    admits what it fetches only if it is exactly that. Sources are refused unless the loader's operator allows them.

    Exit code 1 when it is refused here or by the loader, or quarantined; the reasons are listed.
    """
    from loraport.admin import AdminClient
    from loraport.publish import publish

    check_alias(alias, approve)
    source = _source(hub, s3, https)
    with AdminClient.local(data) as admin:
        result = publish(
            admin,
            directory,
            tenant=tenant,
            adapter=name,
            base=base,
            signer=find_signer(data, tenant, signer),
            version=version,
            approve=approve,
            alias=alias,
            notes=notes,
            source=source,
            observe=_tell_stage,
        )
    tell_publication(result, tenant, name, as_json)


def _source(hub: str | None, s3: str | None, https: tuple[str, str] | None) -> "Source":
    from loraport.sources import https_source, hub_source, s3_source

    if sum(option is not None for option in (hub, s3, https)) != 1:
        raise typer.BadParameter("name one source: --hub, --s3 or --https")
    try:
        if hub is not None:
            return hub_source(hub)
        if s3 is not None:
            return s3_source(s3)
        assert https is not None
        return https_source(*https)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _tell_stage(report: Any) -> None:
    from loraport.types.v1.types_pb2 import LoadStage

    stage = LoadStage.Name(report.stage).removeprefix("LOAD_STAGE_").lower()
    note(f"{stage:>8}  {report.elapsed_ms:.0f} ms" + (f"  {report.size_bytes} bytes" if report.size_bytes else ""))
