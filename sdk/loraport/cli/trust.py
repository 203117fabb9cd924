"""`loraport trust`: which keys speak for which role, and the making of the next root."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, note, print_json, print_table, say, wrong_use

if TYPE_CHECKING:
    from loraport.cli.roots import Draft
    from loraport.trust.root import TrustRoot

app = typer.Typer(help="Trust roots: which keys speak for which role.", no_args_is_help=True)

RoleName = Literal["root", "registry", "loader", "router", "timestamp"]
RootKeys = Annotated[
    list[Path] | None,
    typer.Option(
        "--root-key", help="Signer of the role root; may be repeated. Default: trust/root*.key.", readable=False
    ),
]
Folder = Annotated[
    Path | None, typer.Option("--trust", help="Directory of trust roots. Default: trust in the data directory.")
]


@app.command("show")
def show(
    trust: Folder = None,
    offline: Annotated[bool, typer.Option("--offline", help="Show the directory's; do not ask the registry.")] = False,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Show the newest root that follows the one in the trust directory: roles, thresholds, keys, what has ended."""
    from loraport.cli.roots import believed

    chain = believed(data, trust or data / "trust", offline=offline)
    root = chain[-1].root
    if as_json:
        print_json(_value(root) | {"chain": [item.row() for item in chain]})
        return
    state = "has EXPIRED" if time.time() > root.expires else "expires"
    say(f"trust root {root.version}, issued {_time(root.issued)}, {state} {_time(root.expires)}")
    rows = [
        [str(role), f"{of_role.threshold} of {len(of_role.key_ids)}", key]
        for role, of_role in root.roles.items()
        for key in of_role.key_ids
    ]
    print_table(("role", "needs", "key id"), rows)
    if root.ended:
        ended = [[item.role, item.key_id, str(item.since), _time(item.until), item.reason] for item in root.ended]
        print_table(("role", "ended key", "since log index", "until", "reason"), ended)
    say(f"chain {chain[0].root.version} to {root.version}, each signed by the thresholds of the one before and its own")


@app.command("init")
def init(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Make a key for every role and the first root, where there is none yet. A local stack does so by itself."""
    from loraport.dev.credentials import ensure_trust
    from loraport.dev.layout import Layout
    from loraport.trust.files import read_chain

    layout = Layout.at(data)
    if any(layout.trust.glob("*.root.json")):
        raise wrong_use(f"{layout.trust} holds a trust root already; see: loraport trust show")
    layout.trust.mkdir(mode=0o700, parents=True, exist_ok=True)
    ensure_trust(layout)
    root = read_chain(layout.trust)[-1][0]
    if as_json:
        print_json(_value(root))
    else:
        say(f"trust root 1 is in {layout.trust}; take root.key off this machine once it is not needed")


@app.command("rotate")
def rotate(
    role: Annotated[
        RoleName | None, typer.Option(help="Role that gets a new key. Default: none, the root is only signed anew.")
    ] = None,
    public_key: Annotated[
        list[Path] | None,
        typer.Option("--public-key", readable=False, help="Its new public keys (PEM), instead of one made here."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the role's present keys beside the new ones.")] = False,
    threshold: Annotated[int | None, typer.Option(min=1, help="How many keys must sign; role root only.")] = None,
    since_log_index: Annotated[
        int | None,
        typer.Option(min=0, help="The old key has leaked: nothing of it counts from this leaf of the log on."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for people; stays in the root.")] = "replaced",
    days: Annotated[int, typer.Option(min=1, max=730, help="How long the new root lives.")] = 365,
    root_key: RootKeys = None,
    draft: Annotated[
        Path | None, typer.Option(help="Write a draft for other holders to sign, instead of submitting it.")
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Make the next root: give a role a new key, sign with the old and the new root's keys, put it in force.

    Running services follow within seconds; what the old key signed before stays valid.
    """
    from loraport.admin import AdminClient
    from loraport.cli.roots import Draft, last_root, write_draft
    from loraport.trust.edit import next_root
    from loraport.trust.root import Role

    if role is None and (public_key or keep or since_log_index is not None):
        raise wrong_use("say which role gets other keys: --role ROLE")
    if threshold is not None and role != "root":
        raise wrong_use("--threshold goes with --role root: services sign with one key")
    folder = data / "trust"
    make = role is not None and not public_key and not (keep and threshold)
    with AdminClient.local(data) as admin, _new_key(folder, role if make else None) as (path, pem):
        old = last_root(admin, folder)
        new = next_root(
            old,
            now=int(time.time()),
            role=Role(role) if role else None,
            public_keys=[pem] if pem else [given.read_bytes() for given in public_key or ()],
            keep=keep,
            threshold=threshold,
            since=admin.get_checkpoint().tree_size if since_log_index is None else since_log_index,
            compromised=since_log_index is not None,
            reason=reason,
            life_s=days * 86400,
        )
        plan = Draft(new, b"").sign(_holders(folder, root_key, old, new))
        if draft is not None:
            write_draft(draft, plan)
            _tell_draft(draft, plan, old, as_json)
            return
        plan.require(old)
        answer = admin.submit_trust_root(plan.envelope)
    _tell(folder, plan, old, answer, path, as_json)


@app.command("leaked")
def leaked(
    key: Annotated[str, typer.Argument(help="Id of a key that a role had once; see: loraport trust show.")],
    since_log_index: Annotated[
        int, typer.Option(min=0, help="Nothing of the key counts from this leaf of the log on.")
    ],
    root_key: RootKeys = None,
    draft: Annotated[
        Path | None, typer.Option(help="Write a draft for other holders to sign, instead of submitting it.")
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Say of a key that was replaced already that it had leaked: what it signed since stops.

    For a key that a role still has: loraport trust rotate --role ROLE --since-log-index N.
    """
    from loraport.admin import AdminClient
    from loraport.cli.roots import Draft, last_root, write_draft
    from loraport.trust.edit import leaked_earlier

    folder = data / "trust"
    with AdminClient.local(data) as admin:
        old = last_root(admin, folder)
        new = leaked_earlier(old, key, since=since_log_index, now=int(time.time()))
        plan = Draft(new, b"").sign(_holders(folder, root_key, old, new))
        if draft is not None:
            write_draft(draft, plan)
            _tell_draft(draft, plan, old, as_json)
            return
        plan.require(old)
        answer = admin.submit_trust_root(plan.envelope)
    _tell(folder, plan, old, answer, None, as_json)


@contextmanager
def _new_key(folder: Path, role: str | None) -> Iterator[tuple[Path | None, bytes]]:
    """Makes a key file for a role and gives its path and public key; takes it away when no root can name the key."""
    from loraport.bundle.envelope import SigningKey
    from loraport.errors import LoraportError

    if role is None:
        yield None, b""
        return
    key = SigningKey.generate()
    path = folder / f"{role}.{key.key_id[:12]}.key"
    key.save(path)
    try:
        yield path, key.public_pem
    except (LoraportError, ValueError, OSError) as error:
        # After a call that broke off the root may be in force, and the key be the only one that a service has.
        if getattr(error, "reason", "INVALID_TRUST_ROOT") == "INVALID_TRUST_ROOT":
            path.unlink(missing_ok=True)
        raise


@app.command("sign")
def sign(
    draft: Annotated[Path, typer.Argument(help="Draft made by `trust rotate --draft`.")],
    key: Annotated[list[Path], typer.Option("--key", help="Your root key; may be repeated.", readable=False)],
    trust: Folder = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Add your signature to a draft. Needs no registry; look at the draft first, its content is printed."""
    from loraport.cli.roots import read_draft, write_draft
    from loraport.trust.files import read_chain
    from loraport.trust.signers import open_signer

    old = read_chain(trust or data / "trust")[-1][0]
    plan = read_draft(draft).sign([open_signer(path) for path in key])
    write_draft(draft, plan)
    _tell_draft(draft, plan, old, as_json)


@app.command("submit")
def submit(
    draft: Annotated[Path, typer.Argument(help="Draft that enough holders have signed.")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Put a signed draft in force."""
    from loraport.admin import AdminClient
    from loraport.cli.roots import last_root, read_draft

    plan, folder = read_draft(draft), data / "trust"
    with AdminClient.local(data) as admin:
        old = last_root(admin, folder)
        plan.require(old)
        answer = admin.submit_trust_root(plan.envelope)
    _tell(folder, plan, old, answer, None, as_json)


def _holders(folder: Path, given: list[Path] | None, old: "TrustRoot", new: "TrustRoot") -> list[Any]:
    """Returns the signers of the role root: those that were named, or those that lie in the trust directory."""
    from loraport.trust.root import Role
    from loraport.trust.signers import open_signer

    if given:
        return [open_signer(path) for path in given] + _signers(folder, set(new.roles[Role.ROOT].key_ids))
    return _signers(folder, {*old.roles[Role.ROOT].key_ids, *new.roles[Role.ROOT].key_ids})


def _signers(folder: Path, named: set[str]) -> list[Any]:
    from loraport.trust.signers import open_signer

    found = [open_signer(path) for path in sorted({*folder.glob("root.key"), *folder.glob("root.*.key")})]
    return [signer for signer in found if signer.key_id in named]


def _tell(folder: Path, plan: "Draft", old: "TrustRoot", answer: Any, path: Path | None, as_json: bool) -> None:
    from loraport.trust.files import write_root

    write_root(folder, plan.root, plan.envelope)
    ended = [item for item in plan.root.ended if item not in old.ended]
    stopped = answer.stopped_revision_count
    if as_json:
        extra = {"log_index": answer.log_index, "stopped_revision_count": stopped, "key": str(path) if path else None}
        print_json(_value(plan.root) | extra)
        return
    say(f"trust root {plan.root.version} is in force, leaf {answer.log_index} of the log")
    if path is not None:
        say(f"  the new key is {path}")
    for item in ended:
        say(f"  key {item.key_id} of {item.role} counts up to log index {item.since}; destroy its file")
    if stopped:
        note(f"{stopped} revisions stopped; see: loraport audit list")


def _tell_draft(path: Path, plan: "Draft", old: "TrustRoot", as_json: bool) -> None:
    missing = plan.missing(old)
    if as_json:
        print_json(_value(plan.root) | {"draft": str(path), "missing": missing})
        return
    say(f"draft of trust root {plan.root.version} in {path}")
    for role, of_role in plan.root.roles.items():
        say(f"  {role}: {of_role.threshold} of {', '.join(of_role.key_ids)}")
    for item in plan.root.ended:
        say(f"  ended for {item.role}: {item.key_id} since log index {item.since} ({item.reason})")
    for line in missing:
        say(f"  missing: {line}")
    say("sign it: loraport trust sign FILE --key KEY" if missing else f"put it in force: loraport trust submit {path}")


def _value(root: "TrustRoot") -> dict[str, Any]:
    return {
        "version": root.version,
        "issue_time": _time(root.issued),
        "expire_time": _time(root.expires),
        "digest": root.digest,
        "roles": {
            str(role): {"threshold": of_role.threshold, "keys": list(of_role.key_ids)}
            for role, of_role in root.roles.items()
        },
        "ended": [
            {
                "role": item.role,
                "key": item.key_id,
                "since_log_index": item.since,
                "until": _time(item.until),
                "reason": item.reason,
            }
            for item in root.ended
        ],
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
