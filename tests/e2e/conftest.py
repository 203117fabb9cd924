"""One stack for the whole session; tests that break things start their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Stack, add_tenant, running
from tests.support.collector import Collector, collecting


@pytest.fixture(scope="session")
def cases(cases_dir: Path) -> dict[str, dict[str, Any]]:
    """The entries of the adapter cases by name."""
    return {entry["case"]: entry for entry in json.loads((cases_dir / "cases.json").read_text())}


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """What the session's stack sends its metrics and traces to."""
    with collecting() as started:
        yield started


@pytest.fixture(scope="session")
def stack(world_dir: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Stack]:
    """A running stack on the small base, in float32, with the tenants acme and globex; told of a collector."""
    data, base = tmp_path_factory.mktemp("stack"), f"tiny={world_dir / 'bases' / 'tiny'}"
    # As compose does, through the environment; and more often than once a minute.
    told = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
        "OTEL_METRIC_EXPORT_INTERVAL": "3000",
    }
    with running(data, "--base", base, "--dtype", "float32", environ=told) as started:
        add_tenant(started, "acme")
        add_tenant(started, "globex")
        yield started


@pytest.fixture
def tiny(world_dir: Path) -> str:
    """The `--base` argument for the small base."""
    return f"tiny={world_dir / 'bases' / 'tiny'}"
