"""The life of a service process: read the configuration, serve, drain on SIGTERM, exit.

Exit codes: 0 after a drain, 2 when the configuration or an address cannot be used, 1 on a fault.
"""

import argparse
import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

import structlog

from services.shared import metrics, telemetry
from services.shared.config import ConfigError, load_config
from services.shared.futures import fault_of

log = structlog.get_logger()

# How often gauges are set.
SAMPLE_S = 2.0


class Service(Protocol):
    """What `main` needs of a service."""

    async def start(self) -> None:
        """Binds the addresses and serves; returns once health says SERVING."""

    async def stop(self) -> None:
        """Drains and releases everything."""

    async def failed(self) -> None:
        """Returns when the service cannot go on; never returns otherwise."""

    async def sample(self) -> None:
        """Sets the gauges, and the counters that are kept elsewhere, to what they are now."""


class ServiceConfig(Protocol):
    """What `main` needs of a configuration."""

    @property
    def telemetry(self) -> telemetry.TelemetryConfig:
        """What the process tells of itself."""


async def first_ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Returns when one of the tasks has ended, which only a bug can make them do, and says which and why.

    What a service relies on in the background must not stop unnoticed: a peer that hears of no revocation any more, or
    that no longer takes leases back, must not look alive.
    """
    done, _ = await asyncio.wait(set(tasks), return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        log.error("background task ended", task=task.get_name(), exc_info=fault_of(task))


C = TypeVar("C", bound=ServiceConfig)


def main(name: str, config_type: type[C], build: Callable[[C], Awaitable[Service]]) -> int:
    """Runs the service `name` until SIGTERM or SIGINT; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{name}")
    parser.add_argument("--config", required=True, help="JSON file with the fields of the service's config class")
    options = parser.parse_args()
    telemetry.setup(name)
    try:
        config = load_config(config_type, options.config)
        return asyncio.run(_run(name, config, build))
    except (ConfigError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)  # noqa: T201 - the one line that a person reads
        return 2


async def _run(name: str, config: C, build: Callable[[C], Awaitable[Service]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = await build(config)
    port = telemetry.start(name, config.telemetry)
    await service.start()
    telemetry.gauge(metrics.BUILD, 1)
    sampling = asyncio.create_task(_sample(service))
    # What is there by now stays: searching it for garbage again and again held calls up for 50 ms.
    gc.collect()
    gc.freeze()
    log.info("serving", service=name, metrics_port=port)
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(service.failed())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    failed = failing.done()
    for task in (stopping, failing, sampling):
        task.cancel()
    await service.stop()
    return 1 if failed else 0


async def _sample(service: Service) -> None:
    """Keeps the gauges up to date; a failure costs no more than an old value."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            await service.sample()
        except Exception as error:
            log.warning("gauges are not up to date", exc_info=error)
        due = loop.time() + SAMPLE_S
        await asyncio.sleep(SAMPLE_S)
        telemetry.observe(metrics.LOOP_LAG, max(0.0, loop.time() - due))
