"""On one host the executors of a stack take the loader's memory over; without the socket they read it, and serve."""

import stat
from pathlib import Path
from typing import Any

import pytest

from loraport import Client
from tests.e2e.harness import Stack, add_tenant, publish

pytestmark = pytest.mark.e2e

# Of this test alone, so that no other test has its revisions on a device already.
TENANT = "handover"
NOT_HANDED = "host memory was not handed over"


def answer(stack: Stack, bundle: Path, name: str) -> Any:
    publish(stack, bundle, TENANT, name)
    return Client.local(stack.data, tenant=TENANT, timeout=60).generate(
        prompt_token_ids=[1, 2, 3], adapter=name, max_tokens=4, temperature=0.0, ignore_eos=True
    )


def test_memory_is_handed_over_where_it_can_be(stack: Stack, cases_dir: Path, cases: dict[str, dict[str, Any]]) -> None:
    path = stack.data / "run" / "host.sock"
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    admitted = sorted(name for name, entry in cases.items() if entry["verdict"] == "admit")
    logs = [log for log in (stack.data / "logs").glob("*.log") if log.stem not in ("loader", "registry", "router")]
    known = {log: log.read_text().count(NOT_HANDED) for log in logs}

    add_tenant(stack, TENANT)
    assert answer(stack, cases_dir / "bundles" / admitted[0], "handed").token_ids
    assert {log: log.read_text().count(NOT_HANDED) for log in logs} == known

    hidden = path.rename(path.with_name("hidden.sock"))
    try:
        assert answer(stack, cases_dir / "bundles" / admitted[1], "read").token_ids
        assert sum(log.read_text().count(NOT_HANDED) for log in logs) > sum(known.values())
    finally:
        hidden.rename(path)
