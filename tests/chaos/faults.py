"""Faults, one at a time: how each is made, and how it is mended. Own processes and the loopback only."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import valkey

from tests.chaos.certificates import expired
from tests.chaos.disk import filled
from tests.chaos.proxy import Mode
from tests.chaos.wires import Namespace, far_away
from tests.chaos.world import SERVICES, World
from tests.e2e.harness import wait_until

HELD_S = 4.0
# What is waited for comes in seconds; a machine that others use as well may take its time.
SEEN_WITHIN_S = 150.0
PROCESSES = ("valkey", "s3", *SERVICES)
HOUR_S = 3600.0
DISK_DELAY_S = 0.05
LOST_PART = 0.05
# Reasons of a request that a full disk may end: what it needs cannot be written.
FULL = ("STORAGE_FULL", "STORE_UNAVAILABLE", "REGISTRY_UNAVAILABLE", "UNAVAILABLE")


class NotHereError(Exception):
    """This machine cannot have such a fault; the text says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A name, and what is done; it returns when all is as before.

    `run` raises AssertionError when the fleet did not do what it must, NotHereError before anything was done.
    """

    name: str
    run: Callable[[World], None]


def _family(world: World, name: str) -> list[psutil.Process]:
    process = psutil.Process(world.stack.processes()[name])
    return [*process.children(recursive=True), process]


def _killed(name: str) -> Fault:
    def run(world: World) -> None:
        os.kill(world.stack.processes()[name], signal.SIGKILL)
        time.sleep(1.0)
        world.restart(name)

    return Fault(f"kill -9 {name}", run)


def _stopped(name: str) -> Fault:
    def run(world: World) -> None:
        family = _family(world, name)
        for process in family:
            process.suspend()
        try:
            time.sleep(HELD_S)
        finally:
            for process in family:
                process.resume()

    return Fault(f"SIGSTOP {name} for {HELD_S:.0f} s", run)


def _store(mode: Mode) -> Fault:
    def run(world: World) -> None:
        before = world.proxy.connections
        world.proxy.mode = mode
        try:
            # A host tier that is new, without what the disk kept for it, has to ask the store.
            shutil.rmtree(world.stack.data / "disk", ignore_errors=True)
            world.restart("loader")
            asked = lambda: world.proxy.connections > before  # noqa: E731
            wait_until(asked, within_s=SEEN_WITHIN_S, what="a question to the store")
            time.sleep(HELD_S)
        finally:
            world.proxy.mode = "pass"

    return Fault(f"store: {mode}", run)


def _flushed(world: World) -> None:
    password = (world.stack.data / "secrets" / "valkey").read_text()
    with valkey.Valkey(port=world.stack.port_base + 20, password=password) as board:
        for _ in range(20):
            board.flushall()
            time.sleep(HELD_S / 20)


def _alias_moves(world: World) -> None:
    for version in (2, 1, 2, 1):
        assert (refused := world.move_alias(version)) == "", refused


def _disk_full(world: World) -> None:
    """Not a byte is left for anybody: database, state, logs, store, disk tier."""
    if not world.own_disk:
        raise NotHereError("mounting a small file system is not allowed here")
    bundle = str(world.small / "bundles" / "plain_r64")  # which this tenant has not
    register = ("adapter", "register", bundle, "--tenant", "globex", "--name", "filling", "--base", "tiny")
    with filled(world.stack.data):
        refused = world.stack.cli(*register)
        assert refused.code == 1, refused
        assert refused.error.startswith(FULL), refused
        # What was kept is lost for want of room, not what is served.
        shutil.rmtree(world.stack.data / "disk", ignore_errors=True)
        time.sleep(HELD_S)
    wait_until(lambda: world.stack.cli(*register).code == 0, within_s=SEEN_WITHIN_S, what="a publication")


def _disk_slow(world: World) -> None:
    if world.shim is None:
        raise NotHereError("no C compiler here")
    with world.shim.slow_disk(DISK_DELAY_S, *SERVICES):
        for version in (2, 1):
            assert (refused := world.move_alias(version)) == "", refused
        time.sleep(HELD_S)


def _clock(off_s: float, *names: str) -> Fault:
    """Set at once, and set right at once: a step each way."""

    def run(world: World) -> None:
        if world.shim is None:
            raise NotHereError("no C compiler here")
        with world.shim.clock(off_s, *names):
            time.sleep(2 * HELD_S)

    whose = "all clocks" if names == SERVICES else f"clock of {names[0]}"
    return Fault(f"{whose} {abs(off_s) / 60:.0f} min {'ahead' if off_s > 0 else 'behind'}, and back", run)


def _certificate(name: str) -> Fault:
    def run(world: World) -> None:
        with expired(world, name):
            time.sleep(HELD_S)

    return Fault(f"certificate of {name} expired", run)


def _packets_lost(world: World) -> None:
    """One executor runs on a host of its own, to which the wire loses packets both ways."""
    base = world.stack.port_base
    port = world.ports()["tiny-1"]
    with contextlib.closing(Namespace()) as namespace:
        if namespace.fault:
            raise NotHereError(namespace.fault)
        with (
            world.started_by("tiny-1", namespace.inside()),
            far_away(namespace, serves=port, asks=(base + 1, base + 2, base + 20)),
        ):
            world.restart("tiny-1")
            wait_until(lambda: "tiny-1" in world.serving(), within_s=SEEN_WITHIN_S, what="the executor far away")
            can = namespace.lose(LOST_PART)
            time.sleep(2 * HELD_S if can else 0)
            lost = namespace.lost() if can else 0
        world.restart("tiny-1")
    if not can:
        raise NotHereError("this kernel can neither netem nor drop packets by chance")
    assert lost > 0, "no packet was lost"


FAULTS = (
    *map(_killed, PROCESSES),
    *map(_stopped, ("registry", "loader", "tiny-0", "router", "valkey", "s3")),
    *map(_store, ("refuse", "reset", "truncate", "slow", "error")),
    Fault("notice board flushed, 20 times", _flushed),
    Fault("alias moved to and fro", _alias_moves),
    Fault("disk full", _disk_full),
    Fault(f"disk slow by {DISK_DELAY_S * 1000:.0f} ms a piece", _disk_slow),
    _clock(HOUR_S, *SERVICES),
    _clock(-HOUR_S, *SERVICES),
    _clock(HOUR_S / 6, "tiny-1"),
    _clock(-HOUR_S / 6, "registry"),
    _clock(HOUR_S / 6, "router"),
    *map(_certificate, ("tiny-1", "loader", "registry")),
    Fault(f"{LOST_PART:.0%} of packets to an executor lost", _packets_lost),
)
