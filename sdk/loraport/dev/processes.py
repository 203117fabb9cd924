"""Processes that outlive the command that started them, found again without ever hitting a stranger.

A process is known by its number and its start time together: a number alone may have been given to another process
after a reboot or a crash. Nothing is signalled unless both agree.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loraport.dev.layout import StackError

# Start times are computed from the boot time and may shift with a clock step; two processes of one number are
# never this close.
START_TIME_SLACK_S = 2.0
TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A process of a stack. `started` is its start time in seconds since the epoch, `port` what it listens on."""

    name: str
    pid: int
    started: float
    port: int


def spawn(name: str, command: Sequence[str], *, port: int, log: Path, env: Mapping[str, str]) -> ProcessRecord:
    """Starts a process in its own session, with its output in `log`.

    Raises:
        StackError: the program is not there or cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
    except OSError as error:
        raise StackError(f"cannot start {name}: {command[0]}: {error.strerror}") from None
    try:
        started = psutil.Process(process.pid).create_time()
    except psutil.Error:
        started = time.time()
    return ProcessRecord(name=name, pid=process.pid, started=started, port=port)


def find(record: ProcessRecord) -> psutil.Process | None:
    """Returns the running process of a record, or None: gone, a zombie, or another process of the same number."""
    try:
        process = psutil.Process(record.pid)
        if abs(process.create_time() - record.started) > START_TIME_SLACK_S:
            return None
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.Error:
        return None


def find_by_command(commands: Mapping[str, Sequence[str]]) -> list[ProcessRecord]:
    """Returns this user's processes that run exactly one of `commands` (by name); their ports are not known."""
    wanted = {tuple(command): name for name, command in commands.items()}
    found = []
    for process in psutil.process_iter(["cmdline", "uids", "create_time"]):
        name = wanted.get(tuple(process.info["cmdline"] or ()))
        if name is not None and process.info["uids"].real == os.getuid():
            record = ProcessRecord(name=name, pid=process.pid, started=process.info["create_time"], port=0)
            found.append(record)
    return found


def exit_code(record: ProcessRecord) -> int | None:
    """Returns the exit code of a child of this process that has ended, None when it runs or is nobody's child."""
    try:
        pid, status = os.waitpid(record.pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if pid else None


def stop_all(records: Iterable[ProcessRecord], *, grace_s: float) -> list[str]:
    """Ends processes: SIGTERM to all, then SIGKILL to those still there after `grace_s`; returns who was killed."""
    alive = {record.name: process for record in records if (process := find(record)) is not None}
    for process in alive.values():
        _send(process, signal.SIGTERM)
    _wait(alive, grace_s)
    killed = sorted(alive)
    for process in alive.values():
        _send(process, signal.SIGKILL)
    _wait(alive, 5.0)
    return killed


def last_line(log: Path) -> str:
    """Returns the last line of a log that is not empty, or an empty text."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _wait(alive: dict[str, psutil.Process], seconds: float) -> None:
    """Waits for processes to end and takes those that did out of `alive`."""
    deadline = time.monotonic() + seconds
    while alive:
        for name, process in list(alive.items()):
            if _ended(process):
                del alive[name]
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _ended(process: psutil.Process) -> bool:
    _reap(process.pid)
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _send(process: psutil.Process, number: signal.Signals) -> None:
    # psutil compares the start time once more before it signals.
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _reap(pid: int) -> None:
    """Takes the exit status of an ended child, so that it does not stay as a zombie; other processes have no effect."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
