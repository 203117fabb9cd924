"""The benchmark of cold loads runs, and says PASS only for what is good."""

import json
import subprocess
import sys
from pathlib import Path

from bench.figures import Figure

ROOT = Path(__file__).resolve().parents[2]


def test_a_figure_passes_on_its_side_of_the_target() -> None:
    good = Figure(name="a", value=2.0, baseline=1.0, target=2.0, unit="ms")
    assert good.passed
    assert good.line().startswith("a ")
    assert good.line().endswith("PASS")
    assert Figure(name="a", value=2.1, baseline=1.0, target=2.0, unit="ms").line().endswith("FAIL")
    assert Figure(name="a", value=2.1, baseline=1.0, target=2.0, unit="1/s", at_most=False).passed


def test_cold_loads_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.cold_load", "--size", "300000", "--rounds", "5", "--out"]
    done = subprocess.run(
        [*command, str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    names = [figure["name"] for figure in document["figures"]]
    assert names == [
        "cold_load_store",
        "cold_load_store_by_file",
        "cold_load_disk",
        "host_to_handover",
        "store_reads_for_50",
    ]
    assert all(any(line.startswith(name) for line in done.stdout.splitlines()) for name in names)
    assert document["figures"][4]["value"] == 1
    assert document["machine"]
