"""Faults, one at a time: how each is made, and how it is mended. Own processes and the loopback only."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import valkey

from tests.chaos.proxy import Mode
from tests.chaos.world import World

HELD_S = 4.0
PROCESSES = ("valkey", "s3", "registry", "loader", "tiny-0", "tiny-1", "router")


@dataclass(frozen=True, slots=True)
class Fault:
    """A name, and what is done; it returns when all is as before."""

    name: str
    run: Callable[[World], None]


def _family(world: World, name: str) -> list[psutil.Process]:
    process = psutil.Process(world.stack.processes()[name])
    return [*process.children(recursive=True), process]


def _killed(name: str) -> Fault:
    def run(world: World) -> None:
        os.kill(world.stack.processes()[name], signal.SIGKILL)
        time.sleep(1.0)
        answer = world.stack.cli("dev", "restart", name)
        assert answer.code == 0, answer

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
        # A new host tier has to ask the store.
        answer = world.stack.cli("dev", "restart", "loader")
        try:
            assert answer.code == 0, answer
            time.sleep(HELD_S)
            assert world.proxy.connections > before, "nobody asked the store"
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
        assert world.move_alias(version) == 0


FAULTS = (
    *map(_killed, PROCESSES),
    *map(_stopped, ("registry", "loader", "tiny-0", "router", "valkey", "s3")),
    *map(_store, ("refuse", "reset", "truncate", "slow", "error")),
    Fault("notice board flushed, 20 times", _flushed),
    Fault("alias moved to and fro", _alias_moves),
)
