"""The Triton kernels compiled for GPUs that are not here: no spills, shared memory that fits, nothing to recompile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from services.executor.kernels.variants import VARIANTS
from tests.kernels.targets import DTYPES, TARGETS, jobs

pytest.importorskip("triton", reason="Triton is not installed: its kernels are not compiled here")
ROOT = Path(__file__).resolve().parents[2]
POINTERS = {"x", "y", "a", "b", "scale", "pages", "records", "counts", "h"}
# Compile-time constants: the model's shape, the pool's page, the variant. Nothing that a step changes.
SPECIALIZED = {
    "IN", "OUT0", "OUT1", "OUT2", "SUBS", "PAGE", "ROWS", "RANKS", "COLS", "SPLITS", "UPCAST",
}  # fmt: skip


def test_every_variant_compiles_for_every_target() -> None:
    """A part of what `make test-kernels` compiles, in a process of its own: this one has the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.targets"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [r for r in results if r["fault"]] or done.stderr
    assert results
    assert max(r["registers"] for r in results) <= 255
    print(done.stderr)


def test_the_part_compiles_every_variant_for_every_target_and_all_of_it_in_both_dtypes() -> None:
    targets = tuple(TARGETS)
    for everything, keys in ((False, product(VARIANTS, targets)), (True, product(VARIANTS, targets, DTYPES))):
        seen = {(j.variant, j.target, j.dtype)[: 2 + everything] for j in jobs(everything=everything, targets=targets)}
        assert seen == set(keys)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_nothing_that_changes_between_steps_is_specialized(name: str) -> None:
    """Each argument is a pointer (16-byte aligned: the launcher checks) or one of the listed constants.

    So a kernel has one compilation per group shape, dtype and variant, and no integer's value can cause another.
    """
    source = (ROOT / f"services/executor/kernels/triton_{name}.py").read_text()
    signatures = re.findall(r"def (?:shrink|expand)_\w+\((.*?)\):", source, re.DOTALL)
    assert len(signatures) == 2
    for signature in signatures:
        arguments = [a.strip() for a in re.sub(r"#.*", "", signature).split(",") if a.strip()]
        constants = {a.split(":")[0] for a in arguments if a.endswith(": tl.constexpr")}
        assert constants <= SPECIALIZED
        assert {a for a in arguments if ":" not in a} <= POINTERS
        assert all(":" not in a or a.endswith(": tl.constexpr") for a in arguments)
