"""`make compose-test` as a part of the suite, where a Docker engine runs already; elsewhere it says why not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_ENGINE = 3


def test_the_stack_of_the_compose_file_works() -> None:
    command = [sys.executable, "-m", "tests.compose", "--running"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    if done.returncode == NO_ENGINE:
        pytest.skip(done.stdout.strip().removeprefix("compose-test: skipped: "))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
