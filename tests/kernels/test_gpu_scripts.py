"""The scripts for a GPU machine: tried on the interpreter, and honest where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu import tune
from bench.gpu.bed import Device, find_device
from services.executor.kernels import gpu_lora
from services.executor.kernels.layout import make_layout
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.variants import VARIANTS
from services.executor.kernels.work import WorkLimits
from tests.kernels.triton_rig import PAGE, Rig, group_of

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


@pytest.mark.usefixtures("interpreter")
def test_a_table_is_measured_written_found_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make tune-kernels` from its clock to the variant of a step. The clock makes the one fastest that no roofline takes."""
    ticks = {"triton-prefill-64x16": 1.0, "triton-decode-4x8": 2.0}
    monkeypatch.setattr(tune, "VARIANTS", {name: VARIANTS[name] for name in ticks})
    monkeypatch.setattr(gpu_lora, "TABLES", tmp_path / "tables")
    timed: list[str] = []

    def milliseconds(device: Device, work: Callable[[], object], *, seconds: float = 0.1) -> float:
        work()
        timed.append(tuple(ticks)[len(timed) % 2])
        return ticks[timed[-1]]

    monkeypatch.setattr(Device, "milliseconds", milliseconds)
    device = find_device(rehearse=True)
    assert device is not None
    table = tune.make_table(replace(device, name="NVIDIA H200"), [(1, 1), (2, 1)])
    assert [(e["rows"], e["rank"], e["variant"]) for e in table["entries"]] == [
        (1, 1, "triton-prefill-64x16"),
        (2, 1, "triton-prefill-64x16"),
    ]
    assert all(e["us"] == {name: 1e3 * ms for name, ms in ticks.items()} for e in table["entries"])
    path = tune.write_table(table)
    assert [path] == list((tmp_path / "tables").iterdir())
    rig = Rig(group_of(64, (64,)), [1], torch.float32)
    banks = {"g": Bank(rig.a, rig.b, rig.scale, rig.group.out_features)}
    limits = WorkLimits(rows=8, adapters=2, rank=8, pages=rig.page_count)
    paths = {}
    for gpu in ("NVIDIA H200", "NVIDIA H100"):
        lora = gpu_lora.GpuLora((rig.group,), banks, rows_per_page=PAGE, limits=limits, gpu=gpu, multiprocessors=1)
        paths[gpu] = [lora.arrange(make_layout([0], [rows]), rig.residents).path for rows in (1, 2, 3)]
    assert paths["NVIDIA H100"] == ["triton-decode-1x8", "triton-decode-4x8", "triton-decode-4x8"], "a roofline"
    assert paths["NVIDIA H200"] == ["triton-prefill-64x16"] * 2 + paths["NVIDIA H100"][2:], (
        "as far as the table reaches"
    )
