"""`adapter import` against a whole stack, which by default fetches from nowhere."""

from pathlib import Path

import pytest

from tests.e2e.harness import Stack, add_tenant

pytestmark = pytest.mark.e2e

SOURCES = (
    ("--hub", "acme/pirate@" + "0" * 40),
    ("--s3", "lake/adapters/config,weights"),
    ("--https", "https://127.0.0.1/config", "https://169.254.169.254/weights"),
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source[0])
def test_an_import_that_is_not_allowed_says_so_and_an_upload_takes_its_place(
    stack: Stack, world_dir: Path, source: tuple[str, ...]
) -> None:
    tenant, name = f"import{source[0]}", "pirate"
    add_tenant(stack, tenant)
    bundle = str(world_dir / "bundles" / "alpha_1")
    common = (bundle, "--tenant", tenant, "--name", name, "--base", "tiny")
    refused = stack.cli("adapter", "import", *common, *source)
    assert refused.code == 1
    assert "SOURCE_NOT_ALLOWED" in refused.error
    # The revision is announced and waits for its bytes; sending them is as good.
    assert stack.ok("adapter", "show", f"{tenant}/{name}@v1")["state"] == "PENDING"
    assert stack.ok("adapter", "register", *common)["state"] == "VERIFIED"
