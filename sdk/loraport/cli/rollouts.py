"""`loraport rollout`: an alias moves on evidence, and moves back in an instant."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraport.cli.references import Reference, find_revision, parse_reference
from loraport.cli.rollout_view import follow, lines, rollout_row, short, state_of
from loraport.cli.views import DEFAULT_DATA, Data, Json, OptionalTenant, print_json, print_rows, say, wrong_use

if TYPE_CHECKING:
    from loraport.admin import AdminClient
    from loraport.registry.v1.rollout_service_pb2 import Rollout, RolloutPrompt

app = typer.Typer(help="Rollouts: move an alias in steps, each judged.", no_args_is_help=True)

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="NAME with --tenant, or TENANT/NAME.")]
Which = Annotated[str | None, typer.Option("--rollout", "-r", help="Its id, e.g. r3. Default: the newest.")]
Why = Annotated[str, typer.Option("--reason", help="Why; kept in the story and the audit log.")]
NeededWhy = Annotated[str, typer.Option("--reason", help="Why; kept in the story and the audit log. Needed.")]
PromptFile = Path | None
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)?")
_UNITS = {"ms": 0.001, "s": 1, None: 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}


@app.command("start")
def start(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="NAME with --tenant, TENANT/NAME, TENANT/NAME@vN.")],
    tenant: OptionalTenant = None,
    version: Annotated[int | None, typer.Option("--version", min=1, help="Default: the newest ACTIVE one.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="sha256:… to move to, instead.")] = None,
    alias: Annotated[str, typer.Option("--alias", help="The alias to move.")] = "prod",
    steps: Annotated[str, typer.Option("--steps", help="Shares in percent.")] = "1,5,25,50,100",
    min_samples: Annotated[int, typer.Option("--min-samples", min=0, help="Requests of each arm and step.")] = 200,
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=1, help="Hold after so many without verdict.")
    ] = 8000,
    min_time: Annotated[str, typer.Option("--min-time", help="Least time of a step.")] = "60s",
    quorum: Annotated[int, typer.Option("--quorum", min=0, help="Executors that must be READY; 0: all.")] = 0,
    golden: Annotated[PromptFile, typer.Option("--golden", help="File of golden prompts, one a line.")] = None,
    evals: Annotated[PromptFile, typer.Option("--eval", help="File of prompts to compare perplexity on.")] = None,
    shadow: Annotated[float, typer.Option("--shadow", min=0, max=100, help="Percent of requests to copy first.")] = 0.0,
    shadow_time: Annotated[str, typer.Option("--shadow-time", help="How long.")] = "60s",
    margin: Annotated[float, typer.Option("--margin", help="Percent slower that is rolled back.")] = 5.0,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Percent slower to rule out before 100 %.")] = 10.0,
    error_margin: Annotated[float, typer.Option("--error-margin", help="More errors, in points, rolled back.")] = 2.0,
    retention: Annotated[str, typer.Option("--retention", help="The old revision stays this long.")] = "10min",
    preload_time: Annotated[str, typer.Option("--preload-time", help="Hold without quorum after this.")] = "10min",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check it and show the plan; start nothing.")] = False,
    watch_it: Annotated[bool, typer.Option("--watch", help="Follow it to its end.")] = False,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Start to move an alias to another revision. Golden prompts: one a line, as text or as a JSON object with
    `text` or `token_ids`."""
    from loraport.admin import AdminClient

    reference = parse_reference(adapter, tenant=tenant, version=version)
    settings = _settings(
        {
            "alias": alias,
            "step_percents": read_steps(steps),
            "min_sample_count": min_samples,
            "quorum_count": quorum,
            "golden_prompts": read_prompts(golden),
            "eval_prompts": read_prompts(evals),
            "shadow_percent": shadow,
        },
        {
            "rollback_margin_percent": margin,
            "advance_tolerance_percent": tolerance,
            "error_margin_percent": error_margin,
            "max_sample_count": max(max_samples, min_samples),
        },
        {"min_step_duration": min_time, "retention_duration": retention},
        {"preload_timeout": preload_time, "shadow_duration": shadow_time},
    )
    with AdminClient.local(data) as admin:
        found = find_revision(admin, revision or adapter, tenant=tenant, version=version, state="ACTIVE")
        settings.to_revision_id = found.revision_id
        rollout = admin.rollouts.start(reference.tenant, reference.adapter, settings, dry_run=dry_run)
        if watch_it and not dry_run:
            _end(follow(admin.rollouts.watch(rollout.name), as_json=as_json))
    _started(rollout, dry_run, as_json)


def _settings(values: dict[str, Any], gates: dict[str, Any], *spans: dict[str, str]) -> "Rollout":
    """Returns the message of the settings; `spans` are durations of the rollout and of its gates, as typed."""
    from loraport.registry.v1.rollout_service_pb2 import Rollout, RolloutGates

    settings = Rollout(**values, gates=RolloutGates(**gates))
    for message, texts in zip((settings, settings.gates), spans, strict=True):
        for field, text in texts.items():
            getattr(message, field).FromNanoseconds(round(read_span(text) * 1e9))
    return settings


def _started(rollout: "Rollout", dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json(rollout_row(rollout))
    elif dry_run:
        say(f"nothing is started; {rollout.name.rsplit('/', 1)[-1]} would:")
        for line in rollout.plan:
            say(f"  {line}")
    else:
        _show(rollout)


@app.command("status")
def status(
    adapter: Adapter,
    which: Which = None,
    tenant: OptionalTenant = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Show a rollout: its step and share, the arms and what the judge makes of them, and every decision so far."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        rollout = admin.rollouts.get(find_rollout(admin, adapter, which, tenant))
    if as_json:
        print_json(rollout_row(rollout))
    else:
        _show(rollout)


@app.command("watch")
def watch(
    adapter: Adapter,
    which: Which = None,
    tenant: OptionalTenant = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Follow a rollout to its end. Exit code 0 when it has succeeded, 1 when not."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        name = find_rollout(admin, adapter, which, tenant)
        _end(follow(admin.rollouts.watch(name), as_json=as_json))


@app.command("list")
def list_rollouts(
    adapter: Annotated[str | None, typer.Argument(metavar="[ADAPTER]", help="Default: everybody's.")] = None,
    tenant: OptionalTenant = None,
    running: Annotated[bool, typer.Option("--running", help="Only those that have not ended.")] = False,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """List rollouts, newest first."""
    from loraport.admin import AdminClient
    from loraport.rollouts import ENDED

    reference = parse_reference(adapter, tenant=tenant) if adapter else None
    with AdminClient.local(data) as admin:
        owner = (reference.tenant, reference.adapter) if reference else (None, None)
        found = [item for item in admin.rollouts.list(*owner) if not (running and item.state in ENDED)]
    rows = [rollout_row(item) if as_json else short(item) for item in found]
    if reference is None and tenant is not None:
        rows = [row for row in rows if row["tenant"] == tenant]
    columns = ("tenant", "adapter", "rollout", "alias", "state", "hold_reason", "share", "to", "update_time")
    print_rows(rows, as_json=as_json, columns=columns, empty="no rollouts; see: loraport rollout start --help")


@app.command("pause")
def pause(
    adapter: Adapter,
    which: Which = None,
    tenant: OptionalTenant = None,
    reason: Why = "",
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Hold a rollout at its present share; its gates watch on."""
    _move("pause", adapter, which, tenant, reason, data, as_json)


@app.command("resume")
def resume(
    adapter: Adapter,
    which: Which = None,
    tenant: OptionalTenant = None,
    reason: Why = "",
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Let a held rollout go on."""
    _move("resume", adapter, which, tenant, reason, data, as_json)


@app.command("advance")
def advance(
    adapter: Adapter,
    reason: NeededWhy,
    which: Which = None,
    tenant: OptionalTenant = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Go to the next step without waiting for evidence; the quorum is never skipped."""
    _move("advance", adapter, which, tenant, reason, data, as_json)


@app.command("rollback")
def rollback(
    adapter: Adapter,
    reason: NeededWhy,
    which: Which = None,
    tenant: OptionalTenant = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Decide against the new revision: the old one answers every new request at once."""
    _move("roll_back", adapter, which, tenant, reason, data, as_json)


@app.command("abort")
def abort(
    adapter: Adapter,
    reason: NeededWhy,
    which: Which = None,
    tenant: OptionalTenant = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Call a rollout off before the alias has moved; nothing is said about the new revision."""
    _move("abort", adapter, which, tenant, reason, data, as_json)


def _move(
    what: str, adapter: str, which: str | None, tenant: str | None, reason: str, data: Path, as_json: bool
) -> None:
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        rollout = getattr(admin.rollouts, what)(find_rollout(admin, adapter, which, tenant), reason)
    if as_json:
        print_json(rollout_row(rollout))
    else:
        say(f"{rollout.name.rsplit('/', 1)[-1]} is {state_of(rollout)}: {rollout.story[-1].sentence}")


def _show(rollout: "Rollout") -> None:
    for line in lines(rollout):
        say(line)


def _end(rollout: Any) -> None:
    succeeded = rollout is not None and state_of(rollout) == "SUCCEEDED"
    raise typer.Exit(0 if succeeded else 1)


def find_rollout(admin: "AdminClient", adapter: str, which: str | None, tenant: str | None) -> str:
    """Returns the resource name of an adapter's rollout, by default of the newest.

    Raises:
        LoraportError: there is none.
    """
    from loraport.errors import NotFoundError

    reference: Reference = parse_reference(adapter, tenant=tenant)
    if which is not None:
        return f"tenants/{reference.tenant}/adapters/{reference.adapter}/rollouts/{which}"
    for rollout in admin.rollouts.list(reference.tenant, reference.adapter):
        return str(rollout.name)
    raise NotFoundError(f"{reference.tenant}/{reference.adapter} has no rollout", reason="ROLLOUT_NOT_FOUND")


def read_steps(text: str) -> list[float]:
    """Reads shares in percent, separated by commas. Raises an error of exit code 2."""
    try:
        return [float(part.strip().removesuffix("%")) for part in text.split(",")]
    except ValueError:
        raise wrong_use(f"--steps are percents such as 1,5,25,50,100, not {text!r:.60}") from None


def read_span(text: str) -> float:
    """Reads a duration such as 90, 60s, 10min, 1h; returns seconds. Raises an error of exit code 2."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise wrong_use(f"{text!r:.40} is no duration; write 60s, 10min or 1h")
    return float(match[1]) * _UNITS[match[2]]


def read_prompts(path: Path | None) -> "list[RolloutPrompt]":
    """Reads a file of prompts: each line is one, as text, or as a JSON object with `text` or `token_ids`.

    Raises:
        OSError: the file cannot be read.
        An error of exit code 2: a line is no prompt.
    """
    from loraport.registry.v1.rollout_service_pb2 import RolloutPrompt, RolloutTokenIds

    if path is None:
        return []
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if not line.startswith("{"):
            prompts.append(RolloutPrompt(text=line))
            continue
        try:
            value = json.loads(line)
            ids = value.get("token_ids")
            prompts.append(
                RolloutPrompt(token_ids=RolloutTokenIds(ids=ids)) if ids else RolloutPrompt(text=value["text"])
            )
        except (ValueError, KeyError, TypeError):
            raise wrong_use(f"{path}, line {number}: a JSON object with text or token_ids was expected") from None
    if not prompts:
        raise wrong_use(f"{path} holds no prompt")
    return prompts
