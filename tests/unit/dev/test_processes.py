import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loraport.dev.layout import StackError
from loraport.dev.processes import ProcessRecord, exit_code, find, find_by_command, last_line, spawn, stop_all

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)


def start(tmp_path: Path, code: str, name: str = "p") -> ProcessRecord:
    log = tmp_path / f"{name}.log"
    return spawn(name, [sys.executable, "-c", code], port=1, log=log, env=dict(os.environ))


def wait_for_line(log: Path, line: str) -> None:
    deadline = time.monotonic() + 60
    while last_line(log) != line:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_is_found_until_it_has_ended(tmp_path: Path) -> None:
    record = start(tmp_path, "import time; time.sleep(60)")
    assert find(record) is not None
    assert os.getsid(record.pid) == record.pid  # its own session: a terminal's Ctrl-C does not reach it
    assert stop_all([record], grace_s=60) == []
    assert find(record) is None


def test_a_stranger_with_the_same_number_is_never_touched(tmp_path: Path) -> None:
    record = start(tmp_path, "import time; time.sleep(60)")
    older = replace(record, started=record.started - 60)
    assert find(older) is None
    stop_all([older], grace_s=1)
    assert find(record) is not None
    stop_all([record], grace_s=60)


def test_what_does_not_listen_is_killed(tmp_path: Path) -> None:
    record = start(tmp_path, STUBBORN)
    wait_for_line(tmp_path / "p.log", "deaf")
    assert stop_all([record], grace_s=0.1) == ["p"]
    assert find(record) is None


def test_an_ended_child_counts_as_gone_and_keeps_its_code(tmp_path: Path) -> None:
    record = start(tmp_path, "raise SystemExit(2)")
    deadline = time.monotonic() + 60
    while find(record) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert exit_code(record) == 2


def test_a_killed_child_leaves_no_zombie(tmp_path: Path) -> None:
    record = start(tmp_path, "import time; time.sleep(60)")
    os.kill(record.pid, signal.SIGKILL)
    stop_all([record], grace_s=1)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{record.pid}").exists():
        stop_all([record], grace_s=0.1)
        exit_code(record)
        assert time.monotonic() < deadline


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="cannot start p: /nowhere/program"):
        spawn("p", ["/nowhere/program"], port=1, log=tmp_path / "p.log", env={})


def test_the_last_line_is_the_last_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("first\nsecond  \n\n")
    assert last_line(log) == "second"


def test_a_process_that_was_never_noted_is_found_by_its_exact_command(tmp_path: Path) -> None:
    code = f"import time; time.sleep(60)  # {tmp_path}"
    record = start(tmp_path, code)
    command = [sys.executable, "-c", code]
    wait_until_running = time.monotonic() + 60
    while not (found := find_by_command({"p": command})):
        assert time.monotonic() < wait_until_running
        time.sleep(0.01)
    assert [item.pid for item in found] == [record.pid]
    assert find_by_command({"p": command[:2]}) == []
    assert find_by_command({"p": [*command, "more"]}) == []
    stop_all(found, grace_s=60)
    assert find(record) is None
