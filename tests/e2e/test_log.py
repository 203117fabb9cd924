"""The log of a running stack: audited from outside, remembered by its peers."""

import json
from pathlib import Path

from tests.e2e.harness import Stack, wait_until


def test_the_log_of_a_running_stack_is_good_and_its_peers_remember_it(stack: Stack, tmp_path: Path) -> None:
    found = stack.ok("log", "verify")
    assert found["good"], found
    assert found["row_count"] >= found["tree_size"] >= 5, "two tenants' keys and signers and a base, at least"
    assert {row["kind"] for row in stack.ok("log", "list")} >= {"BASE_MODEL", "SIGNER_CREATED", "API_KEY_CREATED"}

    def floors() -> list[int]:
        names = ("loader", "tiny-0")
        return [json.loads((stack.data / "state" / f"{name}.json").read_bytes())["tree_size"] for name in names]

    stack.ok("key", "create", "--tenant", "acme", "--out", str(tmp_path / "key"))
    key = stack.ok("key", "list", "acme")[-1]["key"]
    stack.ok("key", "revoke", key, "--tenant", "acme")
    # A revocation brings a checkpoint at once, long before the next one is due.
    size = stack.ok("log", "checkpoint")["tree_size"]
    wait_until(lambda: min(floors()) >= size, within_s=120, what="the peers' floors rise")

    peers = {row["peer"]: row for row in stack.ok("log", "peers")}
    assert set(peers) >= {"loader", "executor/tiny-0"}
    assert {row["standing"] for row in peers.values()} == {"OK"}, peers
    assert all(0 < row["tree_size"] <= stack.ok("log", "checkpoint")["tree_size"] for row in peers.values())
    assert {row["standing"] for row in stack.ok("log", "verify")["peers"]} == {"OK"}

    copy = tmp_path / "log"
    stack.ok("log", "export", str(copy))
    assert stack.ok("log", "verify", "--from", str(copy))["good"]
    lines = copy.read_bytes().splitlines()
    copy.write_bytes(b"\n".join(lines[:3] + lines[4:]) + b"\n")
    answer = stack.cli("log", "verify", "--from", str(copy))
    assert answer.code == 1
    assert "DROPPED at row 2" in answer.out
