"""`python -m services.registry --config FILE.json`."""

import sys

from services.registry.config import RegistryConfig
from services.registry.service import RegistryService
from services.shared.rpc.service import main


async def build(config: RegistryConfig) -> RegistryService:
    """Returns the service that `main` runs."""
    return RegistryService(config)


if __name__ == "__main__":
    sys.exit(main("registry", RegistryConfig, build))
