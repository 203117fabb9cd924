"""`python -m services.executor --config FILE.json`."""

import os
import sys
from contextlib import suppress
from functools import partial

# Before torch is imported: OpenMP threads that spin while they wait starve the other processes of a small machine
# (measured on 2 busy cores: 2.5 instead of 40 tokens a second).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Weights, adapters and keys in pages of 2 MiB where the kernel has them: translating addresses took a quarter of a
# decode step on a virtual machine (32 rows: 53 → 40 ms). glibc reads this only as a process begins, so that is twice.
# A mark of its own says that it was: a loader may take the variable away again.
if __name__ == "__main__" and "GLIBC_TUNABLES" not in os.environ and "LORAPORT_AGAIN" not in os.environ:
    with suppress(OSError):  # without them it is slower, and right
        again = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "LORAPORT_AGAIN": "1"}
        os.execve(sys.executable, sys.orig_argv, again)  # noqa: S606 - this program itself

from services.executor.config import ExecutorConfig
from services.executor.service import build
from services.executor.watchdog import ProcessEnd
from services.shared.rpc.service import main

if __name__ == "__main__":
    sys.exit(main("executor", ExecutorConfig, partial(build, last_resort=ProcessEnd())))
