"""The part of `loraport adapter show` that says where a revision is, stage by stage."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraport.cli.views import print_table, say

if TYPE_CHECKING:
    from loraport.presence import PresenceClient

DEVICE_COLUMNS = ("executor", "device", "leases", "bytes", "kv blocks", "load stages")


def local_presence(data: Path) -> "PresenceClient":
    """Returns a client for the local stack at `data`. Raises StackError."""
    from loraport.presence import PresenceClient

    return PresenceClient.local(data)


def presence_row(presence: "PresenceClient", revision_id: str, weights_digest: str, base: str) -> dict[str, Any]:
    """Returns where a revision is: `executors`, one object for each executor of its base model, and `loader`.

    What holds nothing of it says so: `device` is null, `kv_block_count` is 0, `host` is null. A service that did not
    answer has its reason in `error`, and null for all that it did not say.
    """
    executors = []
    for name, state in presence.executors().items():
        if isinstance(state, Exception):
            executors.append({"executor": name, "device": None, "kv_block_count": None, "error": str(state)})
        elif state.base_model == f"baseModels/{base}":
            executors.append(_executor_row(name, state, revision_id))
    return {"executors": executors, "loader": _loader_row(presence, weights_digest)}


def _executor_row(name: str, state: Any, revision_id: str) -> dict[str, Any]:
    found = next((item for item in state.revisions if item.revision_id == revision_id), None)
    device = None
    if found is not None:
        device = {
            "state": found.state,
            "lease_count": found.lease_count,
            "size_bytes": found.size_bytes,
            "stages": [_stage(stage) for stage in found.stages],
        }
    blocks = state.kv_revision_block_counts.get(revision_id, 0)
    return {"executor": name, "device": device, "kv_block_count": blocks, "error": None}


def _loader_row(presence: "PresenceClient", weights_digest: str) -> dict[str, Any]:
    from loraport.errors import LoraportError
    from loraport.types.v1 import types_pb2

    try:
        inventory = presence.inventory()
    except LoraportError as error:
        return {"host": None, "loading": None, "error": str(error)}
    host = next((item for item in inventory.entries if item.weights_digest == weights_digest), None)
    load = next((item for item in inventory.loads if item.weights_digest == weights_digest), None)
    return {
        "host": host
        and {
            "size_bytes": host.size_bytes,
            "lease_count": host.lease_count,
            "stages": [_stage(stage) for stage in host.stages],
        },
        "loading": load and types_pb2.LoadStage.Name(load.stage).removeprefix("LOAD_STAGE_"),
        "error": None,
    }


def _stage(stage: Any) -> dict[str, Any]:
    from loraport.types.v1 import types_pb2

    tier = types_pb2.Tier.Name(stage.tier).removeprefix("TIER_") if stage.tier else None
    return {
        "stage": types_pb2.LoadStage.Name(stage.stage).removeprefix("LOAD_STAGE_"),
        "elapsed_ms": round(stage.elapsed_ms, 3),
        "size_bytes": stage.size_bytes,
        "tier": tier,
    }


def print_presence(row: dict[str, Any]) -> None:
    """Prints what `presence_row` found."""
    cells = [_device_cells(item) for item in row["executors"]]
    if cells:
        print_table(DEVICE_COLUMNS, cells)
    else:
        say("no executor serves its base model")
    loader = row["loader"]
    if loader["error"] is not None:
        say(f"loader: {loader['error']}")
    elif loader["loading"] is not None:
        say(f"loader: loading, at {loader['loading']}")
    elif loader["host"] is None:
        say("loader: nothing in host memory")
    else:
        host = loader["host"]
        say(f"loader: {host['size_bytes']} bytes in host memory, {host['lease_count']} leases; {_told(host['stages'])}")


def _device_cells(item: dict[str, Any]) -> list[str]:
    if item["error"] is not None:
        return [item["executor"], item["error"], "-", "-", "-", "-"]
    device = item["device"] or {"state": "none", "lease_count": 0, "size_bytes": 0, "stages": []}
    counts = (device["lease_count"], device["size_bytes"], item["kv_block_count"])
    return [item["executor"], device["state"], *map(str, counts), _told(device["stages"])]


def _told(stages: list[dict[str, Any]]) -> str:
    return ", ".join(f"{stage['stage']} {stage['elapsed_ms']:.1f} ms" for stage in stages) or "-"
