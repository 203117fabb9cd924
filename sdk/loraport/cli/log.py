"""`loraport log`: what the registry has ever said, and whether its copies still say the same."""

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, print_json, print_rows, say

if TYPE_CHECKING:
    from loraport.admin import AdminClient
    from loraport.log.audit import Audit, Finding
    from loraport.log.checkpoint import Checkpoint
    from loraport.log.leaf import Leaf
    from loraport.log.peers import Standing
    from loraport.log.replay import Replay
    from loraport.trust.root import TrustRoot

app = typer.Typer(help="The transparency log: every record, alias, approval and revocation.", no_args_is_help=True)

# An audit of the catalog is begun anew when something changes meanwhile.
TRIES = 3

Trust = Annotated[Path | None, typer.Option(help="Directory of trust roots. Default: trust in the data directory.")]


@app.command("verify")
def verify(
    copy: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Audit this copy instead of the registry's rows.")
    ] = None,
    trust: Trust = None,
    memory: Annotated[
        Path | None,
        typer.Option(help="File of what the last audit accepted. Default: state/log-audit.json in the data directory."),
    ] = None,
    catalog: Annotated[
        bool, typer.Option(help="Audit what the registry shows beside its log, too: see above. Not with --from.")
    ] = True,
    others: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Compare the logs that peers believe, as `log peers` does.")
    ] = True,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> int:
    """Audit the whole log against the signed checkpoint, and name the first row that was edited, dropped or moved.

    With the registry at hand, also its trust roots, the signatures of its records, what it shows beside them, and
    whether the peers that can be reached were told the same history.
    """
    from loraport.admin import AdminClient
    from loraport.cli.peers import look
    from loraport.log.copy import read_checkpoint, read_leaves

    folder = trust or data / "trust"
    memory = memory or data / "state" / "log-audit.json"
    seen: list[Standing] = []
    if copy is not None:
        checkpoint = _open(read_checkpoint(copy), _keys(_chain(None, folder)), older=True)
        result = _audit(read_leaves(copy), checkpoint, memory, older_is_fine=True)
    else:
        with AdminClient.local(data) as admin:
            for _ in range(TRIES):
                chain = _chain(admin, folder)
                checkpoint, result = _audit_registry(admin, chain, memory, catalog=catalog)
                different = result.finding is not None and result.finding.code in ("CATALOG", "ROOT", "SIGNATURE")
                # What changes while the registry is read would look like a difference.
                if not different or admin.get_checkpoint().tree_size == checkpoint.tree_size:
                    break
            if others:
                seen = look(data, admin, lambda: _newest(admin, folder))
    _show(result, checkpoint, seen, as_json)
    return 0 if result.good and not any(item.alarm for item in seen) else 1


@app.command("peers")
def peers(trust: Trust = None, data: Data = DEFAULT_DATA, as_json: Json = False) -> int:
    """List which log each service believes, and prove that the registry's log begins with it; else an ALARM line.

    A registry that tells two histories is found by the checkpoints that it signed under both.
    """
    from loraport.admin import AdminClient
    from loraport.cli.peers import look, show

    with AdminClient.local(data) as admin:
        found = look(data, admin, lambda: _newest(admin, trust or data / "trust"))
    show(found, as_json=as_json)
    return 1 if any(item.alarm for item in found) else 0


@app.command("checkpoint")
def checkpoint(trust: Trust = None, data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show the registry's newest checkpoint, its signature checked."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        found, _ = _newest(admin, trust or data / "trust")
    row = {
        "tree_size": found.tree_size,
        "root_hash": found.root_hash,
        "catalog_epoch": found.catalog_epoch,
        "revocation_epoch": found.revocation_epoch,
        "issue_time": _time(found.issued),
        "expire_time": _time(found.expires),
        "fresh": time.time() <= found.expires,
    }
    if as_json:
        print_json(row)
    else:
        for name, value in row.items():
            say(f"{name.replace('_', ' '):<17}{value}")


@app.command("list")
def list_leaves(
    start: Annotated[int, typer.Option(min=0, help="Index of the first leaf.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Most leaves to show.")] = 50,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """List leaves as the registry shows them; `verify` says whether to believe it."""
    from loraport.admin import AdminClient
    from loraport.log.leaf import parse_leaf

    with AdminClient.local(data) as admin:
        leaves = [parse_leaf(leaf.body) for leaf in islice(admin.list_leaves(start=start), limit)]
    rows = [
        {
            "index": leaf.index,
            "time": _time(leaf.time),
            "kind": leaf.kind,
            "resource": leaf.resource,
            "digest": leaf.digest,
        }
        for leaf in leaves
    ]
    columns = ("index", "time", "kind", "resource", "digest")
    print_rows(rows, as_json=as_json, columns=columns, empty="no leaves from there on")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="File to write: the checkpoint, then one leaf a line.")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Copy the log and its signed checkpoint into a file, which anybody can audit with `verify --from`."""
    from loraport.admin import AdminClient
    from loraport.log.copy import write_copy

    with AdminClient.local(data) as admin:
        # The checkpoint first: the leaves that are read after it are at least those that it counts.
        newest = admin.get_checkpoint()
        leaves = (leaf.body for leaf in islice(admin.list_leaves(), newest.tree_size))
        count = write_copy(file, newest.envelope, leaves)
    if as_json:
        print_json({"path": str(file), "leaf_count": count})
    else:
        say(f"{count} leaves in {file}; audit it with: loraport log verify --from {file}")


def _newest(admin: "AdminClient", folder: Path) -> "tuple[Checkpoint, dict[str, bytes]]":
    """Returns the registry's newest checkpoint, its signature checked, and the keys that checkpoints count by."""
    keys = _keys(_chain(admin, folder))
    return _open(admin.get_checkpoint().envelope, keys), keys


def _chain(admin: "AdminClient | None", folder: Path) -> "list[tuple[TrustRoot, bytes]]":
    """Returns the trust roots from the directory's first on, the registry's newer ones included."""
    from loraport.cli.roots import follow
    from loraport.trust.files import read_chain

    if admin is None:
        return read_chain(folder)
    return [(item.root, item.envelope) for item in follow(admin, folder)]


def _keys(chain: "list[tuple[TrustRoot, bytes]]") -> dict[str, bytes]:
    """Returns the keys that checkpoints may be signed with."""
    root = chain[-1][0]
    if time.time() > root.expires:
        raise ValueError(f"trust root {root.version} has expired; sign a new one: loraport trust rotate")
    return root.trusted("timestamp", now=time.time())


def _open(envelope: bytes, keys: Mapping[str, bytes], *, older: bool = False) -> "Checkpoint":
    from loraport.log.checkpoint import CheckpointError, open_checkpoint

    try:
        return open_checkpoint(envelope, keys, now=time.time(), older=older)
    except CheckpointError as error:
        raise ValueError(f"the checkpoint proves nothing: {error}") from None


def _audit(rows: Iterable[bytes], checkpoint: "Checkpoint", memory: Path, *, older_is_fine: bool) -> "Audit":
    """Audits rows against the checkpoint and what the last audit accepted, which a good result raises."""
    from loraport.log.audit import audit, contradiction
    from loraport.log.checkpoint import Floor
    from loraport.log.copy import read_floor, write_floor

    floor = read_floor(memory)
    older = floor is not None and checkpoint.tree_size < floor.tree_size
    refused = contradiction(checkpoint, floor) if floor is not None and not (older and older_is_fine) else None
    result = audit(rows, checkpoint, floor=floor, refused=refused)
    if result.good and not older:
        write_floor(memory, (floor or Floor()).raised(checkpoint))
    return result


def _audit_registry(
    admin: "AdminClient", chain: "list[tuple[TrustRoot, bytes]]", memory: Path, *, catalog: bool
) -> "tuple[Checkpoint, Audit]":
    """Audits the registry's own rows and, if these are good, signatures and what it shows beside them."""
    from dataclasses import replace

    from loraport.log.leaf import parse_leaf
    from loraport.log.replay import Replay

    checkpoint = _open(admin.get_checkpoint().envelope, _keys(chain))
    if checkpoint.expires < time.time():
        raise ValueError("the registry's checkpoint has expired: nobody knows what happened since")
    bodies: list[bytes] = [leaf.body for leaf in admin.list_leaves()]
    result = _locate(admin, _audit(bodies, checkpoint, memory, older_is_fine=False), checkpoint)
    if catalog and result.good:
        replay, parsed = Replay(), [parse_leaf(body) for body in bodies[: checkpoint.tree_size]]
        for leaf in parsed:
            replay.take(leaf)
        finding = _signatures(admin, chain, parsed, replay) or replay.compare(_shown(admin), size=checkpoint.tree_size)
        result = replace(result, finding=finding)
    return checkpoint, result


def _signatures(
    admin: "AdminClient", chain: "list[tuple[TrustRoot, bytes]]", leaves: "list[Leaf]", replay: "Replay"
) -> "Finding | None":
    """Audits the trust roots in the log, and by the keys of its place every record by which a revision is ACTIVE.

    A record that was withdrawn or revoked lets nothing serve; its key may well have ended before its place.
    """
    from loraport.errors import NotFoundError
    from loraport.log.replay import Said
    from loraport.log.signatures import place, record_finding

    placed, finding = place(chain, leaves)
    if finding is not None:
        return finding
    for leaf in leaves:
        if replay.said.get(leaf.resource) != Said("ACTIVE", leaf.index):
            continue
        try:
            envelope = admin.get_revision(leaf.resource).record_envelope
        except NotFoundError:
            continue  # the comparison with the catalog says so
        finding = record_finding(leaf, envelope, placed)
        if finding is not None:
            return finding
    return None


def _shown(admin: "AdminClient") -> dict[str, str]:
    """Returns what the registry shows today, in the words of `loraport.log.replay`."""
    from loraport.bundle.digest import sha256_digest
    from loraport.log.replay import shared_digest, signer_text
    from loraport.registry.v1.adapter_service_pb2 import Revision

    shown = {base.name: base.base_id for base in admin.list_base_models()}
    for adapter in admin.list_adapters():
        shown |= {alias.name: alias.revision_id for alias in adapter.aliases}
        if adapter.shared_tenants:
            shown[adapter.name] = shared_digest(name.split("/")[1] for name in adapter.shared_tenants)
        tenant, name = adapter.name.split("/")[1::2]
        for revision in admin.list_revisions(tenant, name):
            shown[revision.name] = Revision.State.Name(revision.state).removeprefix("STATE_")
    for item in admin.list_tenants():
        tenant = item.name.split("/")[1]
        delegation = admin.get_delegation(tenant)
        if delegation.version:
            shown[delegation.name] = sha256_digest(delegation.envelope)
        for signer in admin.list_signers(tenant):
            shown[signer.name] = signer_text(signer.key_id, revoked=signer.HasField("revoke_time"))
        for key in admin.list_api_keys(tenant):
            shown[key.name] = "revoked" if key.HasField("revoke_time") else "valid"
    return shown


def _locate(admin: "AdminClient", result: "Audit", checkpoint: "Checkpoint") -> "Audit":
    """Narrows a rewritten log down to its first row, by proofs that the signed root vouches for."""
    from dataclasses import replace

    from loraport.log.audit import first_difference
    from loraport.log.merkle import leaf_hash, verify_inclusion

    finding = result.finding
    if finding is None or finding.code != "REWRITTEN" or result.root_hash == checkpoint.root_hash:
        return result
    size, root = checkpoint.tree_size, bytes.fromhex(checkpoint.root_hash)

    def differs(index: int) -> bool:
        body = next(iter(admin.list_leaves(start=index))).body
        proof = admin.inclusion_proof(index, size)
        return not verify_inclusion(leaf_hash(body), index, size, list(proof.hashes), root)

    index = first_difference(size, differs)
    detail = "this row and all after it are not those that the root was signed for"
    return replace(result, finding=replace(finding, index=index, detail=detail))


def _show(result: "Audit", checkpoint: "Checkpoint", seen: "list[Standing]", as_json: bool) -> None:
    from loraport.cli.peers import rows_of, say_alarms

    finding = result.finding
    value: dict[str, Any] = {
        "good": result.good and not any(item.alarm for item in seen),
        "tree_size": checkpoint.tree_size,
        "row_count": result.row_count,
        "signed_root": checkpoint.root_hash,
        "root_hash": result.root_hash,
        "issue_time": _time(checkpoint.issued),
        "code": finding.code if finding else None,
        "first_row": finding.index if finding else None,
        "detail": finding.detail if finding else None,
        "peers": rows_of(seen),
    }
    if as_json:
        print_json(value)
        return
    if finding is None:
        say(f"good: all {checkpoint.tree_size} rows are those that were signed at {value['issue_time']}")
        say(f"root {checkpoint.root_hash}")
        if checkpoint.older:
            say("signed by an earlier release, which did not say what was taken back")
    else:
        say(f"BAD: {finding.code} at row {finding.index}: {finding.detail}")
        say(f"signed root {checkpoint.root_hash} of {checkpoint.tree_size} rows; {result.row_count} rows read")
    say_alarms(seen)
    if others := [item for item in seen if not item.alarm]:
        say(f"peers: {', '.join(f'{item.peer} {item.code}' for item in others)}")


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
