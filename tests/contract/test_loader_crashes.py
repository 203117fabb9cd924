"""Whatever breaks, and wherever the loader dies: no orphan anywhere, and the next try works.

Every file, memory, store and registry operation of an upload, a load from the store and a load from disk is made to
fail once, before and after it happened; and at every one of them a loader process is killed by the kernel.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support.crashes import Fuse, Loader, Signed, World, fused, whole_life

ROOT = Path(__file__).resolve().parents[2]


async def one_failure(root: Path, signed: Signed, at: int, *, after: bool) -> Fuse:
    """Lets operation `at` fail; the same loader must then do the work, and so must a new one."""
    world, fuse = World(root, signed), Fuse(at, after=after)
    with fused(fuse), capture_logs():  # thousands of faults, each with its traceback
        loader = Loader(world, fuse)
        failure: Exception | None = None
        try:
            await asyncio.to_thread(loader.start)
            await loader.work()
        except Exception as error:  # a reason for the caller; what counts is what is left behind
            failure = error
        await loader.settle()
        fuse.at = 0
        del failure
        loader.check_memory()
        world.check_bytes()
        await loader.work()
        loader.check_memory()
    with capture_logs():
        again = await whole_life(world, Fuse())
    again.check_memory()
    world.check_clean()
    return fuse


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_any_operation_may_fail_once(tmp_path: Path, after: bool) -> None:
    blown, signed = [], Signed()
    for at in range(1, 1000):
        fuse = await one_failure(tmp_path / str(at), signed, at, after=after)
        if not fuse.blown:
            break
        blown.append(fuse.blown)
    kinds = {name.partition(".")[0] for name in blown}
    assert {"memory", "disk", "store", "registry", "spool", "spool file", "disk file"} <= kinds
    assert len(blown) > 100


def test_a_loader_may_be_killed_at_any_operation() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.crashes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={"PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1]) > 100
