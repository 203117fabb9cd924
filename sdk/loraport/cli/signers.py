"""`loraport signer`: whose signatures make a tenant's adapters."""

from pathlib import Path
from typing import Annotated, Any

import typer

from loraport.cli.tenants import Owner, owner_of
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

app = typer.Typer(help="Signers, whose keys sign a tenant's adapters.", no_args_is_help=True)


@app.command("create")
def create_signer(
    tenant: Tenant,
    name: Annotated[str, typer.Argument(help="Id of the signer.")] = "default",
    public_key: Annotated[
        Path | None,
        typer.Option(readable=False, help="Trust this Ed25519 public key (PEM) instead of making a key pair."),
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Make a signing key that only you can read, and trust it to sign a tenant's adapters."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        pem, path = (_public_key(public_key), None) if public_key else _signing_key(data, tenant, name)
        signer = admin.create_signer(tenant, name, pem)
    if as_json:
        print_json({**_signer_row(signer), "path": str(path) if path else None})
    else:
        say(f"signer {name} of {tenant} is trusted; " + (f"its key is {path}" if path else f"key id {signer.key_id}"))


def _public_key(path: Path) -> bytes:
    from loraport.bundle.envelope import EnvelopeError, key_id

    pem = path.read_bytes()
    try:
        key_id(pem)
    except (EnvelopeError, UnicodeDecodeError):
        raise wrong_use(f"--public-key: {path} is not an Ed25519 public key in PEM") from None
    return pem


def _signing_key(data: Path, tenant: str, name: str) -> tuple[bytes, Path]:
    """Returns the public key and the path of a signer's key, made unless an earlier attempt left one."""
    from loraport.bundle.envelope import SigningKey
    from loraport.bundle.manifest import is_name
    from loraport.dev.layout import Layout

    for what, value in (("--tenant", tenant), ("NAME", name)):
        if not is_name(value):
            raise wrong_use(f"{what}: {value!r:.80} is no id: lower-case letters, digits and hyphens, a letter first")
    path = Layout.at(data).signer_key(tenant, name)
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        SigningKey.generate().save(path)
    return SigningKey.load(path).public_pem, path


@app.command("list")
def list_signers(
    owner: Owner = None, tenant: OptionalTenant = None, data: Data = DEFAULT_DATA, as_json: Json = False
) -> None:
    """List a tenant's signers."""
    from loraport.admin import AdminClient

    tenant = owner_of(owner, tenant)
    with AdminClient.local(data) as admin:
        rows = [_signer_row(signer) for signer in admin.list_signers(tenant)]
        threshold = admin.get_delegation(tenant).threshold
    columns = ("signer", "key_id", "create_time", "revoke_time", "since_log_index")
    empty = f"no signers; make one with: loraport signer create --tenant {tenant}"
    print_rows(rows, as_json=as_json, columns=columns, empty=empty)
    if threshold > 1:
        note(f"a manifest needs {threshold} of them")


@app.command("rotate")
def rotate_signer(
    tenant: Tenant,
    name: Annotated[str, typer.Argument(help="Id of the signer that is replaced.")] = "default",
    new: Annotated[str | None, typer.Option(help="Id of the new one. Default: the old one's with a number.")] = None,
    public_key: Annotated[
        Path | None,
        typer.Option(readable=False, help="Trust this Ed25519 public key (PEM) instead of making a key pair."),
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Trust a new key, and accept nothing further by the old one. What the old one signed before stays valid."""
    from loraport.admin import AdminClient
    from loraport.dev.layout import Layout

    with AdminClient.local(data) as admin:
        taken = {last_part(item.name): item for item in admin.list_signers(tenant)}
        if name not in taken or taken[name].HasField("revoke_time"):
            raise wrong_use(f"{name} is no valid signer of {tenant}; see: loraport signer list --tenant {tenant}")
        number = 2
        while new is None:
            candidate, number = f"{name}-{number}", number + 1
            new = candidate if candidate not in taken else None
        pem, path = (_public_key(public_key), None) if public_key else _signing_key(data, tenant, new)
        signer = admin.create_signer(tenant, new, pem)
        admin.revoke_signer(tenant, name)
    old = Layout.at(data).signer_key(tenant, name)
    if old.exists():
        old.rename(old.with_suffix(".retired"))
    if as_json:
        print_json({**_signer_row(signer), "path": str(path) if path else None, "replaced": name})
    else:
        say(f"signer {new} of {tenant} takes the place of {name}; " + (f"its key is {path}" if path else signer.key_id))


@app.command("threshold")
def set_threshold(
    number: Annotated[int, typer.Argument(min=1, max=16, help="How many valid signers a manifest needs.")],
    tenant: Tenant,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Set how many of a tenant's signers must sign a manifest; they sign with: adapter register --signer A,B."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        delegation = admin.set_signer_threshold(tenant, number)
    if as_json:
        print_json({"tenant": tenant, "threshold": delegation.threshold, "version": delegation.version})
    else:
        say(f"manifests of {tenant} need {delegation.threshold} signers")


@app.command("revoke")
def revoke_signer(
    name: Annotated[str, typer.Argument(help="Id of the signer.")],
    tenant: Tenant,
    since_log_index: Annotated[
        int | None,
        typer.Option(min=0, help="The key has leaked: stop what it announced from this leaf of the log on."),
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Accept no further adapter by a signer; what it signed before stays, unless --since-log-index says otherwise."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        signer = admin.revoke_signer(tenant, last_part(name), since_log_index=since_log_index)
    if as_json:
        print_json(_signer_row(signer))
    else:
        say(f"signer {name} of {tenant} is revoked")


def _signer_row(signer: Any) -> dict[str, Any]:
    return {
        "signer": last_part(signer.name),
        "name": signer.name,
        "key_id": signer.key_id,
        "create_time": time_text(signer, "create_time"),
        "revoke_time": time_text(signer, "revoke_time"),
        "since_log_index": signer.since_log_index if signer.HasField("since_log_index") else None,
    }
