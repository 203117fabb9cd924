"""Everything that can be said about the code without running the services: format, lint, types, stubs, walls, docs.

`python scripts/check.py` runs all of it and exits 1 when something fails; `--list` prints the steps.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What a strict type checker must accept: the shared rooms and everything pure.
TYPED = (
    "sdk/loraport/bundle",
    "sdk/loraport/deploy/board.py",
    "sdk/loraport/deploy/site.py",
    "sdk/loraport/log",
    "sdk/loraport/trust",
    "services/shared",
    "services/registry/catalog.py",
    "services/registry/lifecycle.py",
    "services/registry/rollout",
    "services/loader/disk_tier.py",
    "services/loader/fetch",
    "services/loader/host_tier.py",
    "services/loader/quota.py",
    "services/loader/shares.py",
    "services/loader/stages.py",
    "services/router",
    "services/executor/adapter_pool.py",
    "services/executor/block_tables.py",
    "services/executor/eviction.py",
    "services/executor/intake.py",
    "services/executor/kernels/graphs.py",
    "services/executor/kernels/layout.py",
    "services/executor/kernels/shards.py",
    "services/executor/kernels/variants.py",
    "services/executor/kernels/work.py",
    "services/executor/kv_blocks.py",
    "services/executor/model/config.py",
    "services/executor/model/families.py",
    "services/executor/plan.py",
    "services/executor/prefill.py",
    "services/executor/request.py",
    "services/executor/scheduler.py",
    "services/executor/step_meter.py",
    "services/executor/spec_check.py",
    "services/executor/stuck.py",
)

STEPS: dict[str, tuple[str, ...]] = {
    "types": ("mypy", *TYPED),
    "format": ("ruff", "format", "--check", "."),
    "lint": ("ruff", "check", "."),
    "stubs": ("scripts/gen_protos.py", "--check"),
    "error pages": ("scripts/gen_docs.py", "--check"),
}
TESTS: dict[str, tuple[str, ...]] = {
    "walls and documents": ("pytest", "-q", "--no-header", "tests/architecture", "tests/docs", "-k", "not habits"),
}


def command(step: tuple[str, ...]) -> list[str]:
    """Returns the argument vector of a step, run by this interpreter."""
    name, *rest = step
    return [sys.executable, name, *rest] if name.endswith(".py") else [sys.executable, "-m", name, *rest]


def run(step: tuple[str, ...]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a step; returns what came of it and how many seconds it took."""
    started = time.monotonic()
    done = subprocess.run(command(step), cwd=ROOT, capture_output=True, text=True, check=False)
    return done, time.monotonic() - started


def told(name: str, done: subprocess.CompletedProcess[str], seconds: float) -> bool:
    """Prints what came of a step; returns whether it was good."""
    good = done.returncode == 0
    print(f"{'ok  ' if good else 'FAIL'} {name} ({seconds:.1f} s)", flush=True)
    if not good:
        print((done.stdout + done.stderr).strip(), flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the steps and exit")
    if parser.parse_args().list:
        print("\n".join([*STEPS, *TESTS]))
        return 0
    # Side by side, on all cores; the two that take long begin.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        running = {pool.submit(run, step): name for name, step in {**TESTS, **STEPS}.items()}
        failed = [name for done in as_completed(running) if not told(name := running[done], *done.result())]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
