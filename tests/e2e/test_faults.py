"""Parts of the fleet die: callers get a typed error in time, the rest goes on, nothing is lost."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraport import Client, UnavailableError
from tests.e2e.harness import Stack, add_tenant, publish, running, wait_until

pytestmark = pytest.mark.e2e

SOON_S = 30


@pytest.fixture
def own(tmp_path: Path, tiny: str, world_dir: Path) -> Iterator[Stack]:
    """A stack that may be broken, with one adapter in service."""
    with running(tmp_path / "data", "--base", tiny) as stack:
        add_tenant(stack, "acme")
        publish(stack, world_dir / "bundles" / "alpha_1", "acme", "steady")
        yield stack


def kill(stack: Stack, process: str) -> None:
    os.kill(stack.processes()[process], signal.SIGKILL)


def test_without_its_notice_board_the_fleet_serves_on(own: Stack, world_dir: Path) -> None:
    kill(own, "valkey")
    with Client.local(own.data, tenant="acme", timeout=SOON_S) as client:
        assert client.generate("a", adapter="steady", max_tokens=2).revision_id
        publish(own, world_dir / "bundles" / "alpha_8", "acme", "late")
        assert client.generate("a", adapter="late", max_tokens=2).revision_id
    assert own.ok("residency")[0]["serving"] is True


def test_a_dead_executor_is_unavailable_in_time_also_for_a_running_answer(own: Stack) -> None:
    with Client.local(own.data, tenant="acme", timeout=60) as client:
        assert client.generate("a", adapter="steady", max_tokens=2).revision_id
        started = time.monotonic()
        events = client.stream("a", adapter="steady", max_tokens=400, ignore_eos=True, temperature=0.0)
        next(events)
        kill(own, "tiny-0")
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
    with Client.local(own.data, tenant="acme", timeout=60) as client:
        before = client.generate("a b", adapter="steady", max_tokens=8, temperature=0.0)
    # As after a crash: some processes are gone, some are left, and their ports with them.
    killed = own.processes()
    for process in ("registry", "router", "loader", "tiny-0"):
        kill(own, process)
    assert own.cli("dev", "status").code == 1
    assert own.up("--base", tiny).code == 0
    assert not set(killed.values()) & set(own.processes().values())
    with Client.local(own.data, tenant="acme", timeout=60) as client:
        after = client.generate("a b", adapter="steady", max_tokens=8, temperature=0.0)
    assert (after.token_ids, after.revision_id) == (before.token_ids, before.revision_id)


def test_without_its_registry_the_fleet_serves_on_and_publishing_says_why(own: Stack, world_dir: Path) -> None:
    with Client.local(own.data, tenant="acme", timeout=SOON_S) as client:
        assert client.generate("a", adapter="steady", max_tokens=2).revision_id
        kill(own, "registry")
        assert client.generate("a", adapter="steady", max_tokens=2).revision_id
    arguments = ("--tenant", "acme", "--name", "late", "--base", "tiny")
    answer = own.cli("adapter", "register", str(world_dir / "bundles" / "alpha_8"), *arguments)
    assert answer.code == 1
    assert answer.error.startswith("UNREACHABLE")


def test_an_upload_without_a_store_fails_in_time_and_can_be_taken_up_again(
    own: Stack, world_dir: Path, tiny: str
) -> None:
    kill(own, "s3")
    bundle = world_dir / "bundles" / "alpha_8"
    started = time.monotonic()
    answer = own.cli("adapter", "register", str(bundle), "--tenant", "acme", "--name", "late", "--base", "tiny")
    assert time.monotonic() - started < SOON_S
    assert answer.code == 1
    assert answer.error.startswith("STORE_UNAVAILABLE")
    assert own.up("--base", tiny).code == 0
    assert publish(own, bundle, "acme", "late")["version"] == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; needs the right to mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        wait_until(
            lambda: subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode == 0,
            within_s=20,
            what="umount",
        )


@pytest.mark.parametrize("full", ["s3", "spool"])
def test_a_full_disk_on_upload_is_said_and_nothing_is_kept(
    tmp_path: Path, small_disk: Path, tiny: str, world_dir: Path, full: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / full).symlink_to(small_disk)
    with running(data, "--base", tiny) as stack:
        add_tenant(stack, "acme")
        filler = small_disk / "filler"
        filler.write_bytes(bytes(small_disk_free(small_disk)))
        bundle = world_dir / "bundles" / "plain_r64"
        arguments = ("--tenant", "acme", "--name", "large", "--base", "tiny")
        answer = stack.cli("adapter", "register", str(bundle), *arguments)
        assert answer.code == 1
        assert answer.error.startswith(("STORAGE_FULL", "STORE_UNAVAILABLE")), answer
        filler.unlink()
        assert publish(stack, bundle, "acme", "large")["version"] == 1
        with Client.local(stack.data, tenant="acme") as client:
            assert client.generate("a", adapter="large", max_tokens=1).revision_id


def small_disk_free(folder: Path) -> int:
    """Returns the free bytes but for 64 KiB, which bookkeeping may take."""
    usage = os.statvfs(folder)
    return max(0, usage.f_bavail * usage.f_frsize - (64 << 10))
