"""The scripts for a GPU machine: tried on the interpreter, and honest where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tests.kernels.triton_rig  # noqa: F401  (skips where there is no interpreter)
from bench.gpu import tune
from bench.gpu.bed import find_device
from services.executor.kernels.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> tuple[int, str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_device_script_runs_through_and_finds_nothing_wrong() -> None:
    code, said = run("bench/gpu/run.py", "--rehearse", "--minutes", "4")
    assert code == 0, said
    assert f"{len(VARIANTS) + 2} checks, 0 wrong; left out: nothing" in said
    assert said.count("rehearsed ") == 3 + 4, "decode, overhead, prefill; a whole engine's four"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", [("bench/gpu/run.py",), ("-m", "bench.gpu.tune")], ids=str)
def test_without_a_gpu_one_line_says_so(command: tuple[str, ...]) -> None:
    code, said = run(*command)
    assert code == 3
    assert said.startswith("no GPU on this machine")
    assert len(said.splitlines()) == 1


def test_an_entry_of_a_table_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(tune, "VARIANTS", {n: VARIANTS[n] for n in ("triton-decode-4x8", "triton-prefill-64x16")})
    device = find_device(rehearse=True)
    assert device is not None
    entry = tune.measure(device, 1, 1)
    assert entry["variant"] in entry["us"]
    assert set(entry["us"]) == {"triton-decode-4x8", "triton-prefill-64x16"}
