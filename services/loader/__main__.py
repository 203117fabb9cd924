"""`python -m services.loader --config FILE.json`."""

import sys

from services.loader.config import LoaderConfig
from services.loader.service import build
from services.shared.rpc.service import main

if __name__ == "__main__":
    sys.exit(main("loader", LoaderConfig, build))
