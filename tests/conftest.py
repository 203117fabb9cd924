"""Fixtures that several rooms of the suite share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.small_world import make_small_world

# Triton asks for its interpreter when it is imported and when a kernel is defined: both happen during collection
# (peft imports it too). Afterwards the variable is gone again, so that no process that a test starts inherits it.
os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes, or making it does, says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parent.parent
MAKE_CASES = ROOT.parent / "shared" / "cases" / "make_cases.py"


def pytest_collection_finish() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session")
def cases_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases, bundles and expected answers, generated once per session; skips where the generator is absent."""
    if not MAKE_CASES.is_file():
        pytest.skip(f"the adapter cases need {MAKE_CASES}, which is not here")
    folder = tmp_path_factory.mktemp("cases")
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(MAKE_CASES), "--out", str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"make_cases.py failed:\n{done.stdout}\n{done.stderr}"
    return folder


@pytest.fixture(scope="session")
def world_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and a few adapters in the layout of the cases: the cases themselves, or made here without them."""
    if MAKE_CASES.is_file():
        cases: Path = request.getfixturevalue("cases_dir")
        return cases
    folder = tmp_path_factory.mktemp("world")
    make_small_world(folder)
    return folder
