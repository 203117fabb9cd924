"""An adapter that is shared on a running stack, and the audit events that say so."""

from pathlib import Path

from tests.e2e.harness import Stack, add_tenant, publish, wait_until


def test_a_shared_adapter_answers_its_guests_until_it_is_taken_back(stack: Stack, world_dir: Path) -> None:
    add_tenant(stack, "hooli")
    made = publish(stack, world_dir / "bundles" / "alpha_1", "hooli", "common")
    ask = ["generate", "a b c", "--tenant", "globex", "--adapter", "tenants/hooli/adapters/common", "--max-tokens", "4"]

    def hidden() -> str:
        answer = stack.cli(*ask)
        assert answer.code == 1
        text, named, _ = answer.error.partition(", request ")
        assert named, answer  # each has its own
        return text

    before = hidden()
    stack.ok("adapter", "share", "hooli/common", "--with", "globex")
    assert stack.ok(*ask)["revision_id"] == made["revision_id"]
    stack.ok("adapter", "share", "hooli/common", "--nobody")
    wait_until(lambda: stack.cli(*ask).code == 1, within_s=120, what="the end of the share")
    assert hidden() == before
    events = stack.ok("audit", "list", "--limit", "2")
    assert [(event["method"], event["reason"]) for event in events] == [
        ("ShareAdapter", "with nobody"),
        ("ShareAdapter", "with globex"),
    ]
    found = stack.ok("audit", "verify")
    assert found["good"]
    assert found["events"] == events[0]["sequence"]
    assert stack.ok("audit", "verify")["hash"] == events[0]["hash"]
