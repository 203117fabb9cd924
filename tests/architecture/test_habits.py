"""`make check`, as part of the suite: format, lint, types, stubs."""

import importlib.util
import subprocess

import pytest

from tests.architecture.source import ROOT

_spec = importlib.util.spec_from_file_location("check", ROOT / "scripts" / "check.py")
check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check)


@pytest.mark.parametrize("name", list(check.STEPS))
def test_habits(name: str) -> None:
    done = subprocess.run(
        check.command(check.STEPS[name]), cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_typed_file_exists() -> None:
    assert [path for path in check.TYPED if not (ROOT / path).exists()] == []
