"""Parts of the fleet die: callers get a typed error in time, the rest goes on, nothing is lost."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraport import Client, UnavailableError
from tests.chaos.disk import filled, small_disk
from tests.e2e.harness import Stack, add_tenant, publish, running, wait_until

pytestmark = pytest.mark.e2e

# Far below the timeouts of the clients here: what hangs fails.
SOON_S = 120


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, world_dir: Path) -> Iterator[Stack]:
    """A stack that may be broken, with one adapter in service; whoever breaks it mends it."""
    tiny = f"tiny={world_dir / 'bases' / 'tiny'}"
    with running(tmp_path_factory.mktemp("faults") / "data", "--base", tiny) as stack:
        add_tenant(stack, "acme")
        publish(stack, world_dir / "bundles" / "alpha_1", "acme", "steady")
        yield stack


def kill(stack: Stack, process: str) -> None:
    os.kill(stack.processes()[process], signal.SIGKILL)


@contextlib.contextmanager
def without(stack: Stack, process: str) -> Iterator[None]:
    """What happens inside happens while a process is dead."""
    kill(stack, process)
    try:
        yield
    finally:
        assert stack.cli("dev", "restart", process).code == 0


def test_without_its_notice_board_the_fleet_serves_on(own: Stack, world_dir: Path) -> None:
    with without(own, "valkey"), Client.local(own.data, tenant="acme", timeout=300) as client:
        assert client.generate("a", adapter="steady", max_tokens=2).revision_id
        publish(own, world_dir / "bundles" / "alpha_8", "acme", "unnoticed")
        assert client.generate("a", adapter="unnoticed", max_tokens=2).revision_id
        assert own.ok("residency")[0]["serving"] is True


def test_a_dead_executor_is_unavailable_in_time_also_for_a_running_answer(own: Stack) -> None:
    with Client.local(own.data, tenant="acme", timeout=300) as client:
        assert client.generate("a", adapter="steady", max_tokens=2).revision_id
        started = time.monotonic()
        events = client.stream("a", adapter="steady", max_tokens=400, ignore_eos=True, temperature=0.0)
        next(events)
        with without(own, "tiny-0"):
            with pytest.raises(UnavailableError):
                list(events)
            with pytest.raises(UnavailableError) as caught:
                client.generate("a", adapter="steady", max_tokens=2)
            assert caught.value.reason == "EXECUTOR_UNAVAILABLE"
            assert time.monotonic() - started < SOON_S
            answer = own.cli("generate", "a", "--tenant", "acme", "--adapter", "steady")
            assert answer.code == 1
            assert answer.error.startswith("EXECUTOR_UNAVAILABLE")


def test_a_killed_stack_is_cleaned_up_by_the_next_up_and_nothing_published_is_lost(own: Stack, tiny: str) -> None:
    with Client.local(own.data, tenant="acme", timeout=300, patience=SOON_S) as client:
        before = client.generate("a b", adapter="steady", max_tokens=8, temperature=0.0)
    # As after a crash: some processes are gone, some are left, and their ports with them.
    killed = own.processes()
    for process in ("registry", "router", "loader", "tiny-0"):
        kill(own, process)
    assert own.cli("dev", "status").code == 1
    assert own.up("--base", tiny).code == 0
    assert not set(killed.values()) & set(own.processes().values())
    with Client.local(own.data, tenant="acme", timeout=300) as client:
        after = client.generate("a b", adapter="steady", max_tokens=8, temperature=0.0)
    assert (after.token_ids, after.revision_id) == (before.token_ids, before.revision_id)


def test_without_its_registry_the_fleet_serves_on_and_publishing_says_why(own: Stack, world_dir: Path) -> None:
    with Client.local(own.data, tenant="acme", timeout=300) as client:
        assert client.generate("a", adapter="steady", max_tokens=2).revision_id
        with without(own, "registry"):
            assert client.generate("a", adapter="steady", max_tokens=2).revision_id
            arguments = ("--tenant", "acme", "--name", "unheard", "--base", "tiny")
            answer = own.cli("adapter", "register", str(world_dir / "bundles" / "alpha_8"), *arguments)
            assert answer.code == 1
            assert answer.error.startswith("UNREACHABLE")


def test_an_upload_without_a_store_fails_in_time_and_can_be_taken_up_again(own: Stack, world_dir: Path) -> None:
    bundle = world_dir / "bundles" / "alpha_64"
    register = ("adapter", "register", str(bundle), "--tenant", "acme", "--name", "late", "--base", "tiny")
    # Its peers have found a registry again that was gone.
    wait_until(lambda: own.cli("log", "peers").code == 0, within_s=SOON_S, what="peers that know the log")
    with without(own, "s3"):
        started = time.monotonic()
        answer = own.cli(*register)
        assert time.monotonic() - started < SOON_S
        assert answer.code == 1
        assert answer.error.startswith("STORE_UNAVAILABLE")
    assert publish(own, bundle, "acme", "late")["version"] == 1


def test_a_full_disk_on_upload_is_said_and_nothing_is_kept(tmp_path: Path, tiny: str, world_dir: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    with small_disk(data / "s3") as store, small_disk(data / "spool") as spool:
        if not (store and spool):
            pytest.skip("mounting a small file system is not allowed here")
        with running(data, "--base", tiny) as stack:
            add_tenant(stack, "acme")
            for full, name in {"s3": "plain_r64", "spool": "alpha_64"}.items():
                bundle = world_dir / "bundles" / name
                with filled(data / full):
                    register = (
                        "adapter",
                        "register",
                        str(bundle),
                        "--tenant",
                        "acme",
                        "--name",
                        full,
                        "--base",
                        "tiny",
                    )
                    answer = stack.cli(*register)
                    assert answer.code == 1
                    assert answer.error.startswith(("STORAGE_FULL", "STORE_UNAVAILABLE")), answer
                assert publish(stack, bundle, "acme", full)["version"] == 1
                with Client.local(stack.data, tenant="acme") as client:
                    assert client.generate("a", adapter=full, max_tokens=1).revision_id
