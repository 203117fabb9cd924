"""One stack for the whole session; tests that break things start their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Stack, add_tenant, running


@pytest.fixture(scope="session")
def cases(cases_dir: Path) -> dict[str, dict[str, Any]]:
    """The entries of the adapter cases by name."""
    return {entry["case"]: entry for entry in json.loads((cases_dir / "cases.json").read_text())}


@pytest.fixture(scope="session")
def stack(world_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A running stack on the small base, in float32, with the tenants acme and globex."""
    data = tmp_path_factory.mktemp("stack")
    with running(data, "--base", f"tiny={world_dir / 'bases' / 'tiny'}", "--dtype", "float32") as started:
        add_tenant(started, "acme")
        add_tenant(started, "globex")
        yield started


@pytest.fixture
def tiny(world_dir: Path) -> str:
    """The `--base` argument for the small base."""
    return f"tiny={world_dir / 'bases' / 'tiny'}"
