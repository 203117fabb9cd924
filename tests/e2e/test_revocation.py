"""A revision in use on two executors is revoked: nothing new begins, what runs ends, and every tier is proven empty."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraport import Client, LoraportError
from loraport.dev.layout import Layout, read_endpoints
from loraport.presence import PresenceClient
from loraport.router.v1 import router_admin_service_pb2 as router_pb
from loraport.router.v1 import router_admin_service_pb2_grpc as router_stubs
from loraport.values import Started, Tokens
from tests.e2e.harness import Stack, add_tenant, publish, running, wait_until

pytestmark = pytest.mark.e2e

GONE_WITHIN_S = 60
PROMPT = [5 + number * 3 % 200 for number in range(40)]  # more than two blocks of keys and values
EXECUTORS = {"tiny-0", "tiny-1"}
REFUSALS = {"REVISION_NOT_ACTIVE", "ADAPTER_NOT_FOUND", "REVISION_NOT_FOUND"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, world_dir: Path) -> Iterator[Stack]:
    """A stack with two executors of one base, and two tenants."""
    base = f"tiny={world_dir / 'bases' / 'tiny'}"
    with running(tmp_path_factory.mktemp("pair"), "--base", base, "--executors", "2") as stack:
        add_tenant(stack, "acme")
        add_tenant(stack, "globex")
        yield stack


def drain(stack: Stack, executor: str, *, undrain: bool = False) -> None:
    layout, address = Layout.at(stack.data), read_endpoints(stack.data)["router_admin"]
    credentials = grpc.ssl_channel_credentials(
        layout.certificate("ca").read_bytes(),
        layout.private_key("admin").read_bytes(),
        layout.certificate("admin").read_bytes(),
    )
    with grpc.secure_channel(address, credentials) as channel:
        stub: Any = router_stubs.RouterAdminServiceStub(channel)
        stub.DrainExecutor(router_pb.DrainExecutorRequest(executor=executor, undrain=undrain), timeout=60)


def spread(stack: Stack, client: Client, adapter: str) -> None:
    """Has every executor serve the adapter once."""
    first = client.generate(prompt_token_ids=PROMPT, adapter=adapter, max_tokens=2).executor
    drain(stack, first)
    second = client.generate(prompt_token_ids=PROMPT, adapter=adapter, max_tokens=2).executor
    drain(stack, first, undrain=True)
    assert {first, second} == EXECUTORS


@dataclass
class Streams:
    """Threads that ask for one revision again and again until it is refused, and what they were told."""

    stack: Stack
    revision_id: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    tokens: dict[str, int] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    """Executors of the answers that ended after their first token."""
    refused: int = 0
    """Requests that did not begin."""
    reasons: set[str] = field(default_factory=set)
    last_start: float = 0.0
    wrong: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        try:
            with Client.local(self.stack.data, tenant="acme", timeout=300) as client:
                while self._one(client):
                    pass
        except BaseException as error:
            self.wrong.append(error)

    def _one(self, client: Client) -> bool:
        executor, count = "", 0
        try:
            for event in client.stream(
                prompt_token_ids=PROMPT, revision_id=self.revision_id, max_tokens=440, temperature=0.0, ignore_eos=True
            ):
                if isinstance(event, Started):
                    executor = event.executor
                    assert event.revision_id == self.revision_id
                    self.last_start = time.monotonic()
                elif isinstance(event, Tokens):
                    count += len(event.token_ids)
                    with self.lock:
                        self.tokens[executor] = self.tokens.get(executor, 0) + len(event.token_ids)
        except LoraportError as error:
            with self.lock:
                self.reasons.add(error.reason)
                if count:
                    self.cut.append(executor)
                else:
                    self.refused += 1
            return False
        assert count == 440
        return True


def show(stack: Stack, revision_id: str) -> dict[str, Any]:
    row: dict[str, Any] = stack.ok("adapter", "show", revision_id)
    return row


def holds_nothing(row: dict[str, Any]) -> bool:
    empty = all(item["device"] is None and item["kv_block_count"] == 0 for item in row["executors"])
    return empty and row["loader"] == {"host": None, "loading": None, "error": None}


def test_a_revoked_revision_leaves_every_tier_of_every_executor(pair: Stack, world_dir: Path) -> None:
    doomed = publish(pair, world_dir / "bundles" / "plain_r64", "acme", "doomed")["revision_id"]
    steady = publish(pair, world_dir / "bundles" / "alpha_8", "globex", "steady")["revision_id"]
    with Client.local(pair.data, tenant="acme") as acme, Client.local(pair.data, tenant="globex") as globex:
        spread(pair, acme, "doomed")
        spread(pair, globex, "steady")
        options: dict[str, Any] = {"max_tokens": 300, "temperature": 0.0, "ignore_eos": True}
        undisturbed = globex.generate(prompt_token_ids=PROMPT, adapter="steady", **options)

        streams = Streams(pair, doomed)
        threads = [threading.Thread(target=streams.run, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: set(streams.tokens) == EXECUTORS, within_s=120, what="answers on both executors")
        before = show(pair, doomed)
        other = globex.stream(prompt_token_ids=PROMPT, adapter="steady", **options)
        next(other)

        answer = pair.ok("adapter", "revoke", doomed, "--reason", "test of revocation")
        revoked = time.monotonic()
        assert answer["state"] == "REVOKED"
        for thread in threads:
            thread.join(GONE_WITHIN_S)
        assert not any(thread.is_alive() for thread in threads)
        ended = time.monotonic()
        wait_until(lambda: holds_nothing(show(pair, doomed)), within_s=GONE_WITHIN_S, what="the end of every copy")
        wait_until(lambda: not resident(pair, doomed), within_s=GONE_WITHIN_S, what="the end of every report of it")
        gone = time.monotonic()
        assert gone - revoked < GONE_WITHIN_S
        told = [token for event in other if isinstance(event, Tokens) for token in event.token_ids]
        for by in ({"adapter": "doomed"}, {"adapter": "doomed", "alias": "prod"}, {"revision_id": doomed}):
            with pytest.raises(LoraportError) as caught:
                acme.generate(prompt_token_ids=PROMPT, max_tokens=1, **by)  # type: ignore[arg-type]
            assert caught.value.reason in REFUSALS
        again = globex.generate(prompt_token_ids=PROMPT, adapter="steady", **options)

    assert streams.wrong == []
    assert streams.reasons <= REFUSALS
    assert len(streams.cut) + streams.refused == len(threads)
    assert streams.cut, "no answer was running when the revision was revoked"
    check_before(before)
    check_after(pair, doomed)
    assert again.token_ids == undisturbed.token_ids
    assert again.revision_id == steady
    assert undisturbed.token_ids[: len(told)] == tuple(told)
    assert len(told) == len(undisturbed.token_ids)
    print(
        f"\nafter the revocation: the last request began at {max(0.0, streams.last_start - revoked):.3f} s, "
        f"all {len(threads)} streams had ended at {ended - revoked:.3f} s ({len(streams.cut)} in mid-answer), "
        f"no tier held anything at {gone - revoked:.3f} s"
    )


def resident(stack: Stack, revision_id: str) -> list[str]:
    """The executors that the router believes to hold a revision."""
    return [
        executor["executor"]
        for executor in stack.ok("residency")
        if any(revision["revision_id"] == revision_id for revision in executor["revisions"])
    ]


def check_before(row: dict[str, Any]) -> None:
    """While it serves, every stage of its way is told, with its time, on both executors and in the loader."""
    assert {item["executor"] for item in row["executors"]} == EXECUTORS
    for item in row["executors"]:
        device = item["device"]
        assert (device["state"], item["error"]) == ("READY", None)
        assert device["size_bytes"] > 0
        assert item["kv_block_count"] >= len(PROMPT) // 16
        assert [stage["stage"] for stage in device["stages"]][-1] == "READY"
        assert {"RESERVE", "TRANSFER"} <= {stage["stage"] for stage in device["stages"]}
        assert all(stage["elapsed_ms"] >= 0 for stage in device["stages"])
    assert sum(item["device"]["lease_count"] for item in row["executors"]) >= 1
    host = row["loader"]["host"]
    assert host["size_bytes"] == row["size_bytes"]
    assert [stage["stage"] for stage in host["stages"]][:3] == ["RESOLVE", "FETCH", "VERIFY"]


def check_after(stack: Stack, revision_id: str) -> None:
    """What the services say themselves, and what a person reads."""
    row = show(stack, revision_id)
    assert row["state"] == "REVOKED"
    assert {item["executor"] for item in row["executors"]} == EXECUTORS
    assert holds_nothing(row)
    with PresenceClient.local(stack.data) as presence:
        for state in presence.executors().values():
            assert not isinstance(state, LoraportError)
            assert revision_id not in {item.revision_id for item in state.revisions}
            assert revision_id not in state.kv_revision_block_counts
            assert state.kv_used_block_count == 0
        assert row["weights_digest"] not in {item.weights_digest for item in presence.inventory().entries}
    text = stack.cli("adapter", "show", revision_id).out
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in EXECUTORS]
    assert sorted(rows) == [[name, "none", "0", "0", "0", "-"] for name in sorted(EXECUTORS)]
    assert "loader: nothing in host memory" in text
