"""`loraport residency`, `loraport queues`, `loraport fairness`: the fleet as the router sees it."""

from typing import Any

from loraport.cli.views import DEFAULT_DATA, Data, Json, last_part, print_json, print_rows, say, time_text

# Admissions that are shown without --json.
SHOWN = 10


def residency(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show which revisions are on which executor."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        executors = [_executor_row(executor) for executor in admin.residency()]
    if as_json:
        print_json(executors)
        return
    if not executors:
        say("no executors")
    for executor in executors:
        state = "serving" if executor["serving"] else "not serving"
        used, size = executor["pool_used_bytes"], executor["pool_size_bytes"]
        say(f"{executor['executor']} ({executor['base']}): {state}, adapter pool {used} of {size} bytes")
        if executor["revisions"]:
            columns = ("adapter", "version", "state", "lease_count", "size_bytes", "revision_id")
            print_rows(executor["revisions"], as_json=False, columns=columns, empty="")


def queues(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show the tenants that have requests queued or running."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        rows = [
            {
                "tenant": last_part(queue.tenant),
                "queued_count": queue.queued_count,
                "running_count": queue.running_count,
                "oldest_wait_ms": queue.oldest_wait_ms,
            }
            for queue in admin.queues()
        ]
    columns = ("tenant", "queued_count", "running_count", "oldest_wait_ms")
    print_rows(rows, as_json=as_json, columns=columns, empty="nothing is queued or running")


def fairness(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show what every tenant has been charged, and why the newest requests went when they did."""
    from loraport.admin import AdminClient

    kinds = ("counter_ms", "prefill_ms", "decode_ms", "load_ms", "hold_ms", "elsewhere_ms")
    with AdminClient.local(data) as admin:
        found = admin.fairness()
    tenants = [
        {"tenant": last_part(row.tenant), "weight": row.weight} | {kind: round(getattr(row, kind), 1) for kind in kinds}
        for row in found.tenants
    ]
    admissions = [
        {
            "tenant": last_part(row.tenant),
            "executor": row.executor,
            "revision_id": row.revision_id,
            "wait_ms": round(row.wait_ms, 1),
            "why": row.why,
        }
        for row in found.admissions
    ]
    if as_json:
        print_json({"bound_ms": found.bound_ms, "tenants": tenants, "admissions": admissions})
        return
    print_rows(tenants, as_json=False, columns=("tenant", "weight", *kinds), empty="nothing was charged yet")
    say(f"two tenants that both wait differ by at most {found.bound_ms:.0f} ms (of weight 1)")
    for row in admissions[-SHOWN:]:
        say(f"{row['tenant']}: waited {row['wait_ms']:.0f} ms; {row['why']}")


def _executor_row(executor: Any) -> dict[str, Any]:
    return {
        "executor": executor.executor,
        "base": last_part(executor.base_model),
        "serving": executor.serving,
        "report_time": time_text(executor, "report_time"),
        "epoch": executor.epoch,
        "pool_used_bytes": executor.pool_used_bytes,
        "pool_size_bytes": executor.pool_size_bytes,
        "revisions": [
            {
                "revision_id": revision.revision_id,
                "adapter": "/".join(revision.adapter.split("/")[1::2]),
                "version": revision.version,
                "state": revision.state,
                "lease_count": revision.lease_count,
                "size_bytes": revision.size_bytes,
            }
            for revision in executor.revisions
        ],
    }
