"""`python -m services.router --config FILE.json`."""

import sys

from services.router.own_core import use_own_core

if __name__ == "__main__":
    use_own_core()  # before gRPC's threads begin

from services.router.config import RouterConfig
from services.router.service import build
from services.shared.rpc.service import main

if __name__ == "__main__":
    sys.exit(main("router", RouterConfig, build))
