"""Which thread computes with how many; see kernels/threads.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.executor.engine import staging
from services.executor.engine.build import build_engine
from services.executor.engine.staging import Stager
from services.executor.kernels.cpu_step import ASLEEP, AWAKE, Alone, alone
from services.executor.kernels.threads import compute_with
from services.executor.model.native import load_native
from tests.support.compiled import compiled_step
from tests.support.harness import SMALL
from tests.support.tiny import make_base

WORKERS = """
import os, time
from concurrent.futures import ThreadPoolExecutor
import torch
from services.executor.kernels.threads import compute_with

def tasks():
    return len(os.listdir("/proc/self/task"))

def work():
    return float((torch.ones(1 << 20) + 1).sum())

torch.set_num_threads(3)
work()
before = tasks()
with ThreadPoolExecutor(1) as ending:
    ending.submit(work).result()
until = time.monotonic() + 60  # its workers end by themselves
while tasks() > before and time.monotonic() < until:
    time.sleep(0.01)
print("ended", tasks() - before)
lasting = ThreadPoolExecutor(1, initializer=compute_with, initargs=(1,))
lasting.submit(work).result()
print("alone", tasks() - before)
open_handed = ThreadPoolExecutor(1)
open_handed.submit(torch.set_num_threads, 3).result()
open_handed.submit(work).result()
print("not alone", tasks() - before)
"""


@pytest.fixture
def three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_who_arranges_adapters_computes_alone(three: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "stage", lambda *_, **__: torch.get_num_threads())
    assert Stager((), dtype=torch.float32)(None) == 1
    assert torch.get_num_threads() == 3


def test_the_device_thread_computes_with_all_whoever_computed_before_it(three: None, tmp_path: Path) -> None:
    make_base(tmp_path)
    engine = build_engine(
        load_native(tmp_path, dtype=torch.float32), base_digest="sha256:base", sizes=SMALL, clock=lambda: 0.0
    )
    # What another thread sets is what torch gives a new one.
    other = threading.Thread(target=compute_with, args=(1,))
    other.start()
    other.join()
    engine.start()
    try:
        assert engine.ask(torch.get_num_threads).result() == 3
    finally:
        engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_thread_that_ends_and_one_that_is_alone_leave_no_workers() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WORKERS],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    # The pools' own threads are one each; the last one has two workers, which is what the others avoid.
    assert run.stdout.splitlines() == ["ended 0", "alone 1", "not alone 4"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, AWAKE),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, AWAKE),
        ({"OMP_WAIT_POLICY": "passive"}, ASLEEP),
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "30000"}, AWAKE),
        ({"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "0"}, ASLEEP),
    ],
)
def test_threads_that_sleep_are_woken_for_more_work_only(environment: dict[str, str], expected: Alone) -> None:
    assert alone(environment) is expected


SETTLED = """
import os, threading, torch
from services.executor.kernels.compiled import load_step

cpus = os.sched_getaffinity(0)
torch.set_num_threads(len(cpus))
seen = []

def work():
    (torch.ones(1 << 22) + 1).sum()
    seen.append(load_step("on").settle())
    alive = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    own = sorted(tuple(each)[0] for each in alive if len(each) == 1)
    seen.append(len(cpus) == 1 or own == sorted(cpus))
    torch.set_num_threads(len(cpus) + 1)
    seen.append(load_step("on").settle())

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(*seen, os.sched_getaffinity(0) == cpus)
"""


@pytest.mark.parametrize("spins", [True, False])
def test_threads_that_wait_awake_stay_on_a_cpu_each_and_others_do_not(spins: bool) -> None:
    compiled_step()  # or there is none on this machine
    waits = {"GOMP_SPINCOUNT": "30000" if spins else "0", "OMP_WAIT_POLICY": "PASSIVE"}
    told = subprocess.run(
        [sys.executable, "-c", SETTLED], env={**os.environ, **waits}, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert told.stdout.split("\n")[-2].split() == [str(spins), str(spins), "False", "True"]
