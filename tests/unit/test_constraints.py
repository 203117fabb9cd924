"""constraints.txt pins what pyproject.toml asks for, in every extra, and `make lock` keeps it so."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts/lock.py")
assert spec is not None
assert spec.loader is not None
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def pins(text: str) -> dict[str, str]:
    return {lock.name_of(line): line.split("==")[1] for line in text.splitlines()}


def test_every_package_that_is_asked_for_is_pinned_as_it_is_asked_for() -> None:
    found = pins(CONSTRAINTS)
    asked = {name: Requirement(line) for name, line in lock.wanted(PROJECT).items()}
    assert {"grpcio", "flashinfer-python", "securesystemslib"} <= set(asked)
    for name in set(asked) - {"torch", "triton"}:  # theirs are the Makefile's
        assert found[name] in asked[name].specifier, name
    assert not [name for name in found if name.startswith(lock.OF_THE_MACHINE)]


@pytest.mark.parametrize("before", [CONSTRAINTS, ""])
def test_locking_keeps_the_pins_of_what_is_not_installed_here(before: str) -> None:
    installed = "torch==2.13.0+cpu\nGrpcio_Status==1.85.4\nnvidia-ml-py==1\nMako==9\nloraport @ file:///src\n"
    got = pins(lock.lock(installed, before, PROJECT))
    assert got["flashinfer-python"] == pins(CONSTRAINTS)["flashinfer-python"]
    assert got["grpcio-status"] == "1.85.4"
    assert got["mako"] == "9"
    assert {"torch", "nvidia-ml-py", "loraport"}.isdisjoint(got)
    assert ("peft" in got) == bool(before), "asked for by a range: as it was"


def test_what_nobody_asks_for_any_more_goes() -> None:
    assert "oldpackage" not in pins(lock.lock("", "oldpackage==1\n", PROJECT))
