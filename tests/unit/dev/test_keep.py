"""A keeper starts again what failed, lets go of what ended well, and leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from loraport.dev import keep
from loraport.dev.keep import Backoff


def start(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loraport.dev.keep", sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_delays_double_and_steady_runs_forgive() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert backoff.after(1) is None
    backoff = Backoff()
    assert [backoff.after(s) for s in (1, 1, keep.STEADY_S, 1, 1, 1)] == [0.5, 1.0, 0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("code", [0, 2])
def test_what_ends_for_good_is_not_started_again(code: int) -> None:
    process = start(f"print('ran'); raise SystemExit({code})")
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("ran\n", "", code)


def test_what_fails_is_started_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"import os, pathlib, signal; p = pathlib.Path({str(mark)!r})\nif p.exists(): print('again', flush=True)\n"
    code += "else: p.touch(); os.kill(os.getpid(), signal.SIGKILL)"
    process = start(code)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("again\n", 0)
    assert '"exit_code": -9' in err


WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def test_sigterm_reaches_the_command_and_ends_both() -> None:
    process = start(f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {WAIT}")
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not psutil.pid_exists(child)
    process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="a process that ends with its parent is Linux's")
def test_a_killed_keeper_leaves_nothing() -> None:
    process = start(WAIT)
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):  # it may go at any moment
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
