"""`loraport top`: the fleet, live: executors, residency, queues and fairness, loads with their stages, rollouts."""

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, plain, print_json

Once = Annotated[bool, typer.Option("--once", help="Show one picture and end.")]
Every = Annotated[float, typer.Option("--every", min=0.5, max=60.0, help="Seconds between two pictures.")]
# Rows of a section; what is more is counted.
MAX_ROWS = 12
BAR = 20
# Rollouts that are looked through, newest first.
MAX_ROLLOUTS = 200
ENDED = ("SUCCEEDED", "ROLLED_BACK", "ABORTED")


def top(data: Data = DEFAULT_DATA, once: Once = False, every: Every = 2.0, as_json: Json = False) -> None:
    """Show the fleet, again and again until interrupted. --json shows one picture."""
    if as_json:
        print_json(picture(data))
        return
    if once or not sys.stdout.isatty():
        sys.stdout.write("\n".join(lines(picture(data))) + "\n")
        return
    _live(data, every)


def _live(data: Path, every: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text("\n".join(lines(picture(data)))), refresh=True)
            time.sleep(every)


def picture(data: Path) -> dict[str, Any]:
    """Returns everything that is shown, as JSON values. What does not answer has its reason in `errors`."""
    from loraport.admin import AdminClient
    from loraport.errors import LoraportError
    from loraport.operations import OperationsClient
    from loraport.presence import PresenceClient

    found: dict[str, Any] = {"time": time.strftime("%H:%M:%S"), "errors": {}}

    def attempt(name: str, ask: Any) -> None:
        try:
            found[name] = ask()
        except LoraportError as error:
            found[name] = []
            found["errors"][name] = str(error)

    with (
        AdminClient.local(data) as admin,
        PresenceClient.local(data) as presence,
        OperationsClient.local(data) as asked,
    ):
        numbers = asked.metrics()
        attempt(
            "executors", lambda: [_executor(name, one, numbers.get(name)) for name, one in presence.executors().items()]
        )
        attempt("residency", lambda: _residency(admin))
        attempt("queues", lambda: _queues(admin))
        attempt("loads", lambda: _loads(presence))
        attempt("rollouts", lambda: _rollouts(admin))
    router = numbers.get("router")
    found["router"] = {} if isinstance(router, LoraportError) or router is None else _router(router)
    return found


def _executor(name: str, state: Any, numbers: Any) -> dict[str, Any]:
    from loraport.operations import Metrics

    if isinstance(state, Exception):
        return {"executor": name, "state": "silent", "error": str(state)}
    row = {
        "executor": name,
        "state": state.state.lower(),
        "base": state.base_model.rpartition("/")[2],
        "mode": state.mode,
        "running_count": state.running_count,
        "queued_count": state.queued_count,
        "pool_part": state.pool_used_bytes / state.pool_size_bytes if state.pool_size_bytes else 0.0,
        "kv_part": state.kv_used_block_count / state.kv_block_count if state.kv_block_count else 0.0,
        "resident_count": len(state.revisions),
        "load_count": state.load_count,
        "thrash_count": state.thrash_count,
        "step_count": state.step_count,
        "error": None,
    }
    if isinstance(numbers, Metrics):
        row["step_p99_s"] = numbers.quantile("loraport_executor_step_duration_seconds", 0.99)
    return row


def _residency(admin: Any) -> list[dict[str, Any]]:
    return [
        {
            "executor": executor.executor,
            "adapter": "/".join(one.adapter.split("/")[1::2]) or one.revision_id[:19],
            "version": one.version,
            "state": one.state,
            "lease_count": one.lease_count,
            "size_bytes": one.size_bytes,
        }
        for executor in admin.residency()
        for one in executor.revisions
    ]


def _queues(admin: Any) -> list[dict[str, Any]]:
    work = {row.tenant: row for row in admin.fairness().tenants}
    waiting = {row.tenant: row for row in admin.queues()}
    rows = []
    for tenant in sorted(work.keys() | waiting.keys()):
        queue, account = waiting.get(tenant), work.get(tenant)
        rows.append(
            {
                "tenant": tenant.rpartition("/")[2],
                "queued_count": queue.queued_count if queue else 0,
                "running_count": queue.running_count if queue else 0,
                "oldest_wait_ms": queue.oldest_wait_ms if queue else 0.0,
                "counter_ms": account.counter_ms if account else 0.0,
                "weight": account.weight if account else 1.0,
            }
        )
    return sorted(rows, key=lambda row: (-row["queued_count"], -row["running_count"], -row["counter_ms"]))


def _loads(presence: Any) -> list[dict[str, Any]]:
    from loraport.types.v1 import types_pb2

    return [
        {
            "weights_digest": load.weights_digest,
            "stage": types_pb2.LoadStage.Name(load.stage).removeprefix("LOAD_STAGE_"),
            "waiter_count": load.waiter_count,
        }
        for load in presence.inventory().loads
    ]


def _rollouts(admin: Any) -> list[dict[str, Any]]:
    """The rollouts that have not ended."""
    from loraport.registry.v1.rollout_service_pb2 import Rollout

    found = []
    for one in islice(admin.rollouts.list(), MAX_ROLLOUTS):
        state = Rollout.State.Name(one.state).removeprefix("STATE_")
        if state not in ENDED:
            found.append(
                {
                    "name": "/".join(one.name.split("/")[1::2]),
                    "alias": one.alias,
                    "state": state,
                    "share_percent": one.share_percent,
                    "hold_reason": one.hold_reason,
                }
            )
    return found


def _router(metrics: Any) -> dict[str, Any]:
    ttft, tpot = "loraport_router_ttft_seconds", "loraport_router_tpot_seconds"
    return {
        "ttft_p50_s": metrics.quantile(ttft, 0.5),
        "ttft_p99_s": metrics.quantile(ttft, 0.99),
        "tpot_p50_s": metrics.quantile(tpot, 0.5),
        "tpot_p99_s": metrics.quantile(tpot, 0.99),
        "outcomes": metrics.by("loraport_router_requests_total", "outcome"),
        "fairness_spread": metrics.total("loraport_router_fairness_spread"),
        "working_set_bytes": metrics.total("loraport_adapter_working_set_bytes"),
        "capacity_bytes": metrics.total("loraport_adapter_capacity_bytes"),
        "active_count": metrics.total("loraport_adapter_active"),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Returns the picture as lines of text that steer no terminal."""
    return [plain(line) for line in _lines(found)]


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"loraport {found['time']}  {_headline(found['router'])}"
    for name, error in found["errors"].items():
        yield f"! {name}: {error}"
    bars = f"{'POOL':{BAR + 5}} {'KV':{BAR + 5}} {'RUN':>4}"
    yield f"{'EXECUTOR':14} {'STATE':9} {'BASE':14} {bars} {'WAIT':>5} {'REVS':>5} {'LOADS':>6} {'THRASH':>6}"
    for row in found["executors"]:
        yield _executor_line(row)
    yield from _section("TENANT", found["queues"], _queue_line, "nobody has asked for anything yet")
    yield from _section("RESIDENT", found["residency"], _resident_line, "no adapter is on a device")
    yield from _section("LOAD", found["loads"], _load_line, "nothing is being loaded")
    yield from _section("ROLLOUT", found["rollouts"], _rollout_line, "none runs")


def _headline(router: dict[str, Any]) -> str:
    if not router:
        return "the router does not answer"
    outcomes = (
        ", ".join(f"{name} {count:.0f}" for name, count in sorted(router["outcomes"].items()) if count) or "none yet"
    )
    return (
        f"requests: {outcomes}; first token p50 {_under(router['ttft_p50_s'])} p99 {_under(router['ttft_p99_s'])};"
        f" token p50 {_under(router['tpot_p50_s'])}; fairness {router['fairness_spread']:.2f} of bound;"
        f" working set {router['working_set_bytes'] / 2**20:.1f} of {router['capacity_bytes'] / 2**20:.0f} MiB"
    )


def _under(seconds: float | None) -> str:
    return "-" if seconds is None else f"<= {seconds * 1000:.0f} ms"


def _section(title: str, rows: list[Any], line: Any, empty: str) -> Iterator[str]:
    yield ""
    yield f"{title} ({len(rows)})"
    if not rows:
        yield f"  {empty}"
    for row in rows[:MAX_ROWS]:
        yield f"  {line(row)}"
    if len(rows) > MAX_ROWS:
        yield f"  and {len(rows) - MAX_ROWS} more"


def _executor_line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{row['executor']:14} {row['state']:9} {row['error']}"
    return (
        f"{row['executor']:14.14} {row['state']:9.9} {row['base']:14.14}"
        f" {_bar(row['pool_part'])} {_bar(row['kv_part'])}"
        f" {row['running_count']:4} {row['queued_count']:5} {row['resident_count']:5} {row['load_count']:6}"
        f" {row['thrash_count']:6}"
    )


def _bar(part: float) -> str:
    filled = min(BAR, round(part * BAR))
    return "█" * filled + "·" * (BAR - filled) + f"{part:5.0%}"


def _queue_line(row: dict[str, Any]) -> str:
    return (
        f"{row['tenant']:24.24} waiting {row['queued_count']:4} (oldest {row['oldest_wait_ms']:.0f} ms), running"
        f" {row['running_count']:4}, charged {row['counter_ms']:.0f} ms at weight {row['weight']:g}"
    )


def _resident_line(row: dict[str, Any]) -> str:
    return (
        f"{row['executor']:14.14} {row['adapter']:40.40} v{row['version']:<5} {row['state']:9} leases"
        f" {row['lease_count']:4} {row['size_bytes'] / 2**20:8.1f} MiB"
    )


def _load_line(row: dict[str, Any]) -> str:
    return f"{row['weights_digest'][:19]}  {row['stage']}, {row['waiter_count']} wait"


def _rollout_line(row: dict[str, Any]) -> str:
    held = f", held: {row['hold_reason']}" if row["hold_reason"] else ""
    return f"{row['name']:50.50} {row['alias']}: {row['state']} at {row['share_percent']:g} %{held}"
