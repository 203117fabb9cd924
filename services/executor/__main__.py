"""`python -m services.executor --config FILE.json`."""

import os
import sys
from functools import partial

# Before torch is imported: OpenMP threads that spin while they wait starve the other processes of a small machine
# (measured on 2 busy cores: 2.5 instead of 40 tokens a second).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from services.executor.config import ExecutorConfig
from services.executor.service import build
from services.executor.watchdog import ProcessEnd
from services.shared.rpc.service import main

if __name__ == "__main__":
    sys.exit(main("executor", ExecutorConfig, partial(build, last_resort=ProcessEnd())))
