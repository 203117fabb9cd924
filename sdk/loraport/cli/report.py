"""`loraport report`: what the fleet's numbers add up to."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, last_part, note, print_json, print_rows, say

if TYPE_CHECKING:
    from loraport.operations import Metrics

app = typer.Typer(help="Reports: cost and capacity.", no_args_is_help=True)


@app.command("cost")
def cost(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show what an accepted request costs, beside one merged model per adapter. Sums since the processes started.

    Accepted is a request that ended well, with the right revision, within the router's objectives.
    """
    from loraport.errors import LoraportError
    from loraport.operations import OperationsClient

    with OperationsClient.local(data) as operations:
        answers = operations.metrics()
    found = {name: one for name, one in answers.items() if not isinstance(one, LoraportError)}
    for name in answers.keys() - found.keys():
        note(f"{name} did not answer; it is not in the sums")
    row = cost_of(found)
    if as_json:
        print_json(row)
    else:
        _print(row)


@app.command("capacity")
def capacity(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show whether the adapters in use fit the executors' pools. Exit code 1 when an active set no longer fits."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        found = admin.capacity()
    bases = [
        {"base": last_part(row.base_model)}
        | {name: getattr(row, name) for name in ("active_count", "active_bytes", "pool_bytes", "fits", "verdict")}
        for row in found.bases
    ]
    columns = (
        "executor", "pool_bytes", "working_set_count", "working_set_bytes", "headroom_bytes", "load_count",
        "reload_count",
    )  # fmt: skip
    executors = [
        {name: getattr(row, name) for name in columns}
        | {"thrashing": {last_part(tenant.tenant): tenant.reload_count for tenant in row.thrashing}}
        for row in found.executors
    ]
    if as_json:
        print_json({"window_s": found.window_s, "bases": bases, "executors": executors})
    else:
        say(f"what was asked for in the last {found.window_s:.0f} s")
        for base in bases:
            say(f"{base['base']}: {base['active_count']} adapters in use; {base['verdict']}")
        print_rows(executors, as_json=False, columns=(*columns, "thrashing"), empty="no executors")
    if not all(base["fits"] for base in bases):
        raise typer.Exit(1)


def cost_of(processes: Mapping[str, "Metrics"]) -> dict[str, Any]:
    """Returns the sums over processes and what follows from them; a rate is None where nothing was accepted.

    The comparison runs every distinct model of a step by itself. Such a step takes at least as long as the shortest
    decode step that was seen, and reads the base's weights once: a lower bound of what one model per adapter costs.
    """

    def total(name: str, **labels: str) -> float:
        return sum(metrics.total(f"loraport_{name}", **labels) for metrics in processes.values())

    device_s, steps, models = total("executor_busy_seconds_total"), total("executor_steps_total"), 0.0
    alone_s = alone_bytes = 0.0
    for metrics in processes.values():
        own_models = metrics.total("loraport_executor_models_total")
        more = max(0.0, own_models - metrics.total("loraport_executor_steps_total"))
        models += own_models
        alone_s += metrics.total("loraport_executor_busy_seconds_total")
        alone_s += more * metrics.total("loraport_executor_step_shortest_seconds")
        alone_bytes += own_models * metrics.total("loraport_executor_base_bytes")
    accepted = total("router_accepted_total", verdict="met")
    read = total("executor_read_bytes_total")
    moved = total("adapter_moved_bytes_total")

    def each(value: float) -> float | None:
        return value / accepted if accepted else None

    return {
        "request_count": int(total("router_requests_total")),
        "answered_right_count": int(total("router_answered_total", revision="right")),
        "answered_wrong_count": int(total("router_answered_total", revision="wrong")),
        "accepted_count": int(accepted),
        "too_slow_count": int(total("router_accepted_total") - accepted),
        "step_count": int(steps),
        "models_per_step": models / steps if steps else None,
        "device_s": device_s,
        "read_bytes": int(read),
        "adapter_moved_bytes": int(moved),
        "device_s_per_accepted": each(device_s),
        "bytes_per_accepted": each(read + moved),
        "one_model_each": {
            "device_s_at_least": alone_s,
            "read_bytes": int(alone_bytes),
            "device_s_per_accepted": each(alone_s),
            "bytes_per_accepted": each(alone_bytes),
            "device_ratio": alone_s / device_s if device_s else None,
            "bytes_ratio": alone_bytes / (read + moved) if read + moved else None,
        },
    }


def _print(row: dict[str, Any]) -> None:
    say(f"{row['request_count']} requests: {row['accepted_count']} accepted, {row['too_slow_count']} too slow")
    say(f"revision: {row['answered_right_count']} right, {row['answered_wrong_count']} wrong")
    if not row["accepted_count"]:
        say("no cost per request yet: nothing was accepted")
        return
    alone = row["one_model_each"]
    say(f"{'per accepted request':32} {'loraport':>14} {'one model each':>16} {'ratio':>7}")
    say(
        f"{'device-seconds':32} {row['device_s_per_accepted']:14.3f} {alone['device_s_per_accepted']:16.3f}"
        f" {alone['device_ratio']:7.2f}"
    )
    say(
        f"{'MB of weights read and moved':32} {row['bytes_per_accepted'] / 1e6:14.1f}"
        f" {alone['bytes_per_accepted'] / 1e6:16.1f} {alone['bytes_ratio']:7.2f}"
    )
    models = f"{row['models_per_step']:.2f} distinct models each"
    say(f"{row['step_count']} steps with {models}, {row['device_s']:.1f} device-seconds")
    say(f"{row['adapter_moved_bytes'] / 1e6:.1f} MB of adapters moved between tiers")
    say("one model each: its device-seconds are a lower bound (docs/operations.md says how it is reckoned)")
