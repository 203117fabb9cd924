"""Drives the real command line, in this process or as its own, against real stacks on loopback."""

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loraport.cli.main import run
from loraport.dev.health import port_free

UP_TIMEOUT_S = 480


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of an error."""
        assert self.err.startswith("error: "), self
        assert self.err.count("\n") == 1, self
        assert "Traceback" not in self.err, self
        return self.err.removeprefix("error: ").strip()


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack's data directory and first port."""

    data: Path
    port_base: int

    def cli(self, *arguments: str) -> Answer:
        """Runs a command in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([*arguments, "--data", str(self.data)])
        return Answer(code, out.getvalue(), err.getvalue())

    def ok(self, *arguments: str) -> Any:
        """Runs a command that must succeed and returns its JSON."""
        answer = self.cli(*arguments, "--json")
        assert answer.code == 0, answer
        return answer.json

    def command(self, *arguments: str) -> list[str]:
        """Returns the argument vector of a command that runs as its own process."""
        return [
            sys.executable,
            "-c",
            "from loraport.cli.main import main; main()",
            *arguments,
            "--data",
            str(self.data),
        ]

    def up(self, *arguments: str, environ: Mapping[str, str] | None = None) -> Answer:
        """Starts the stack by a process of its own, as a person does; `environ` comes on top of the environment."""
        command = self.command("dev", "up", "--port-base", str(self.port_base), *arguments)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            env={**environment(), **(environ or {})},
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def down(self) -> Answer:
        """Ends the stack by a process of its own."""
        done = subprocess.run(
            self.command("dev", "down"),
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            env=environment(),
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def processes(self) -> dict[str, int]:
        """Returns name → pid of the stack's processes, as its state has them."""
        state = json.loads((self.data / "run" / "stack.json").read_bytes())
        return {row["name"]: row["pid"] for row in state["processes"]}

    def leftovers(self) -> list[str]:
        """Returns the command lines of all living processes that speak of this data directory, whoever started them."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            words = process.info["cmdline"] or []
            mine = process.info["pid"] != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE
            # `--data` is a command of a test, not a process of the stack.
            if mine and "--data" not in words and any(str(self.data) in word for word in words):
                found.append(" ".join(words))
        return found


def environment() -> dict[str, str]:
    """Returns an environment in which a test's own settings do not leak into a stack."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("LORAPORT_")},
        "OMP_NUM_THREADS": "2",
    }


def free_port_base() -> int:
    """Returns a first port such that all that a stack may take are free now."""
    chooser = random.SystemRandom()
    while True:
        base = chooser.randrange(20_000, 31_000, 48)
        if all(port_free(base + offset) for offset in range(40)):
            return base


@contextlib.contextmanager
def running(data: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """Runs a stack for the length of a `with` block, and checks that nothing of it is left afterwards."""
    stack = Stack(data, free_port_base())
    try:
        answer = stack.up(*arguments, "--json", environ=environ)
        assert answer.code == 0, answer
        yield stack
    finally:
        stack.down()
        assert stack.leftovers() == []


def wait_until(condition: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Waits for a condition; fails when it does not come true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {within_s} s"
        time.sleep(0.05)


def add_tenant(stack: Stack, tenant: str) -> None:
    """Makes a tenant with an API key and a signer."""
    stack.ok("tenant", "create", tenant)
    stack.ok("key", "create", "--tenant", tenant)
    stack.ok("signer", "create", "--tenant", tenant)


def publish(stack: Stack, bundle: Path, tenant: str, name: str, base: str = "tiny") -> dict[str, Any]:
    """Registers and approves a bundle and points `prod` at it."""
    arguments = ("--tenant", tenant, "--name", name, "--base", base, "--approve", "--alias", "prod")
    published: dict[str, Any] = stack.ok("adapter", "register", str(bundle), *arguments)
    assert published["state"] == "ACTIVE", published
    return published
