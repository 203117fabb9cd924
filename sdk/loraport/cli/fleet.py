"""`loraport residency`, `loraport queues`: the fleet as the router sees it."""

from typing import Any

from loraport.cli.views import DEFAULT_DATA, Data, Json, last_part, print_json, print_rows, say, time_text


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
