"""First in PYTHONPATH, this makes a stack's executors do what `tests/support/executor_faults.py` is told; nobody else.

Python imports a module of this name before a program begins. The keeper of an executor has its name among its arguments
as well, so the place counts.
"""

import os
import sys

if "EXECUTOR_FAULTS" in os.environ and sys.orig_argv[1:3] == ["-m", "services.executor"]:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tests.support.executor_faults import install

    install(os.environ["EXECUTOR_FAULTS"])
