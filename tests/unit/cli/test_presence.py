"""Where a revision is, as `loraport adapter show` tells it."""

from typing import Any

import pytest

from loraport.cli.presence import presence_row, print_presence
from loraport.errors import LoraportError, UnavailableError
from loraport.executor.v1 import executor_service_pb2 as executor_pb
from loraport.loader.v1 import loader_service_pb2 as loader_pb
from loraport.types.v1 import types_pb2

REVISION, WEIGHTS = "sha256:" + "a" * 64, "sha256:" + "b" * 64


class Fleet:
    """Answers like the services; an exception stands for one that does not answer."""

    def __init__(self, executors: dict[str, Any], inventory: Any) -> None:
        self._executors, self._inventory = executors, inventory

    def executors(self) -> dict[str, Any]:
        return self._executors

    def inventory(self) -> Any:
        if isinstance(self._inventory, LoraportError):
            raise self._inventory
        return self._inventory


def holder(base: str = "tiny") -> executor_pb.StateResponse:
    stage = types_pb2.StageReport(stage=types_pb2.LOAD_STAGE_TRANSFER, elapsed_ms=1.25, size_bytes=64)
    revision = executor_pb.DeviceRevision(
        revision_id=REVISION, state="READY", size_bytes=64, lease_count=2, stages=[stage]
    )
    return executor_pb.StateResponse(
        base_model=f"baseModels/{base}", revisions=[revision], kv_revision_block_counts={REVISION: 3}
    )


def test_holders_say_how_and_what_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fetched = types_pb2.StageReport(stage=types_pb2.LOAD_STAGE_FETCH, elapsed_ms=2.5, tier=types_pb2.TIER_STORE)
    host = loader_pb.HostEntry(weights_digest=WEIGHTS, size_bytes=64, lease_count=1, stages=[fetched])
    empty = executor_pb.StateResponse(base_model="baseModels/tiny")
    fleet = Fleet(
        {
            "one": holder(),
            "two": empty,
            "three": UnavailableError("it is down", reason="UNREACHABLE"),
            "far": holder("x"),
        },
        loader_pb.InventoryResponse(entries=[host]),
    )
    row = presence_row(fleet, REVISION, WEIGHTS, "tiny")  # type: ignore[arg-type]
    one, two, three = row["executors"]  # `far` serves another base
    assert one["device"]["stages"] == [{"stage": "TRANSFER", "elapsed_ms": 1.25, "size_bytes": 64, "tier": None}]
    assert (one["device"]["lease_count"], one["kv_block_count"]) == (2, 3)
    assert two == {"executor": "two", "device": None, "kv_block_count": 0, "error": None}
    # Silence is not a proof of absence.
    assert three == {"executor": "three", "device": None, "kv_block_count": None, "error": "UNREACHABLE: it is down"}
    assert row["loader"]["host"]["stages"][0]["tier"] == "STORE"
    print_presence(row)
    text = capsys.readouterr().out
    assert "TRANSFER 1.2 ms" in text
    assert "UNREACHABLE: it is down" in text
    assert "loader: 64 bytes in host memory, 1 leases; FETCH 2.5 ms" in text


def test_a_silent_loader_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    row = presence_row(Fleet({}, UnavailableError("gone")), REVISION, WEIGHTS, "tiny")  # type: ignore[arg-type]
    assert row == {"executors": [], "loader": {"host": None, "loading": None, "error": "gone"}}
    print_presence(row)
    assert capsys.readouterr().out == "no executor serves its base model\nloader: gone\n"
