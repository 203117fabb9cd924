"""A router that is pinned to a core takes it as its own; one that is not is scheduled like everything else."""

import os
import subprocess
import sys

import pytest

CODE = "import os; from services.router.own_core import use_own_core as u; print(u(), os.sched_getscheduler(0))"


@pytest.mark.skipif((os.cpu_count() or 1) == 1, reason="needs a machine of two cores")
@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="needs Linux")
@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_process_is_scheduled_in_batches(pinned: bool) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("this test is pinned itself")
    wanted = {min(cores)} if pinned else cores
    process = subprocess.run(
        [sys.executable, "-c", CODE],
        preexec_fn=lambda: os.sched_setaffinity(0, wanted),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert process.stdout.split() == [str(pinned), str(os.SCHED_BATCH if pinned else os.SCHED_OTHER)]
