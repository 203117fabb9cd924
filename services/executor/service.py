"""Puts an executor together from its configuration, and runs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from loraport.bundle.base import BaseSpec, base_id
from loraport.bundle.base_dir import BaseModelError, read_base_dir
from loraport.executor.v1.executor_service_pb2_grpc import add_ExecutorServiceServicer_to_server
from services.executor import measure
from services.executor.berths import Berths
from services.executor.config import ExecutorConfig
from services.executor.engine.build import Device, EngineSizes, open_device
from services.executor.engine.loop import Engine, EngineOptions
from services.executor.kernels.graphs import CaptureBudget
from services.executor.loader_client import LoaderClient
from services.executor.model.interface import ModelUnsupported
from services.executor.reference_path import ReferencePath
from services.executor.registry_client import RegistryClient
from services.executor.reporter import Reporter
from services.executor.servicer import ExecutorServicer, Identity
from services.executor.watchdog import LastResort, Watchdog
from services.shared import checks, metrics, telemetry
from services.shared.board import Board
from services.shared.catalog import RevisionItem
from services.shared.checkpoint import CheckpointKeeper, checkpoint_keys, prove_by
from services.shared.clock import Clock, SystemClock
from services.shared.config import ConfigError
from services.shared.names import is_id
from services.shared.rpc.channels import peer_channel
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from services.shared.rpc.service import first_ended
from services.shared.rpc.telemetry import add_telemetry
from services.shared.trust import TrustError, TrustStore, state_file

log = structlog.get_logger()

WATCH_S = 0.5
# The longest that a change of what rollouts need may go unnoticed.
KEEP_S = 5.0


class ExecutorService:
    """An executor process: one address, one base, one device thread."""

    def __init__(
        self, config: ExecutorConfig, *, trust: TrustStore, clock: Clock, last_resort: LastResort | None
    ) -> None:
        self._config = config
        self._trust = trust
        self._clock = clock
        self._server = Server(CertificateAuthorities.from_files(config.tls.service_ca, config.tls.admin_ca))
        self._loader = LoaderClient(peer_channel(config.loader_address, config.tls), timeout_s=config.loads.timeout_s)
        channel = peer_channel(config.registry_address, config.tls)
        keeper = CheckpointKeeper(
            prove_by(channel), trusted=checkpoint_keys(trust), policy=config.checkpoint, clock=clock
        )
        self._registry = RegistryClient(
            channel, keeper, trusted=trust.keys("registry"), on_gone=self._gone, on_root=trust.offer
        )
        trust.on_change(self._registry.forget)
        self._board = Board(config.valkey_url)
        self._device: Device | None = None
        self._base_bytes = 0
        self._berths: Berths | None = None
        self._servicer: ExecutorServicer | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._last_resort = last_resort
        self._watchdog: Watchdog | None = None
        self._stuck = asyncio.Event()
        self.port = 0

    async def start(self) -> None:
        """Takes the address, loads the base (seconds), then serves.

        Raises:
            OSError: the address cannot be used.
            ConfigError: the base cannot be served.
        """
        config = self._config
        key, certificate = config.tls.read()
        self.port = self._server.listen(config.listen, key=key, certificate=certificate, clients=True)
        # In a thread that ends: what it computes with would stay as long as it does (kernels/threads.py).
        with ThreadPoolExecutor(1, "loraport-open") as opener:
            device, base = await asyncio.get_running_loop().run_in_executor(opener, self._open)
        self._device = device
        identity = Identity(
            name=config.name,
            base_model=config.base_model,
            base_id=base,
            epoch=int(self._clock.now() * 1000),
            dtype=config.dtype,
        )
        self._berths = Berths(
            device,
            loader=self._loader,
            registry=self._registry,
            base_id=base,
            clock=self._clock,
            max_loads=config.loads.at_a_time,
            timeout_s=config.loads.timeout_s,
        )
        reference = ReferencePath(device, loader=self._loader, registry=self._registry)
        self._servicer = servicer = ExecutorServicer(
            device,
            self._berths,
            reference=reference,
            registry=self._registry,
            routers=self._trust.keys("router"),
            identity=identity,
            clock=self._clock,
        )
        self._server.add(add_ExecutorServiceServicer_to_server, servicer)
        add_telemetry(self._server, "executor", self._checks(), clock=self._clock)
        device.engine.start()
        self._watchdog = self._watch(device.engine)
        self._registry.start()
        reporter = Reporter(
            self._board,
            device.engine.state,
            executor=config.name,
            base_id=base,
            epoch=identity.epoch,
            clock=self._clock,
        )
        self._reporting = asyncio.create_task(reporter.run())
        self._keeping = asyncio.create_task(self._keep_needed(device.engine), name="pins of rollouts")
        await self._server.start()

    async def sample(self) -> None:
        """Sets the gauges."""
        if self._device is None:
            return
        engine, seen = self._device.engine, self._registry.seen()
        measure.sample(engine.state(), engine.meter.take(), base_bytes=self._base_bytes)
        telemetry.gauge(metrics.CATALOG_EPOCH, self._registry.epoch)
        telemetry.gauge(metrics.LOADS_OPEN, self._berths.loading if self._berths is not None else 0)
        if seen is not None:
            telemetry.gauge(metrics.CHECKPOINT_AGE, self._clock.now() - seen[0].issued)

    def _checks(self) -> dict[str, checks.Check]:
        config = self._config
        return {
            "certificate": checks.certificate(config.tls.certificate, self._clock),
            "trust root": checks.trust_root(self._trust, self._clock),
            **self._registry.checks(self._clock),
            "loader": checks.reachable("the loader", config.loader_address, "see whether it serves, and its log"),
            "notice board": self._board.check,
        }

    def _watch(self, engine: Engine) -> Watchdog:
        loop = asyncio.get_running_loop()

        def on_stuck() -> None:  # on the watchdog's thread
            engine.give_up()
            loop.call_soon_threadsafe(self._stuck.set)

        limit_s = self._config.life.step_timeout_s
        watchdog = Watchdog(engine.turn, limit_s=limit_s, on_stuck=on_stuck, last_resort=self._last_resort)
        watchdog.start()
        return watchdog

    def _open(self) -> tuple[Device, str]:
        config, directory = self._config, Path(self._config.base_dir)
        started = self._clock.monotonic()
        log.info("reading the base model", base_model=config.base_model)
        sizes = EngineSizes(
            kv_bytes=config.kv_bytes,
            pool_bytes=config.pool_bytes,
            block_size=config.block_size,
            page_rows=config.page_rows or (1 if config.model.device == "cpu" else 8),
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            max_waiting=config.max_open,
            eviction=config.eviction,
        )
        try:
            spec = read_base_dir(directory)
            base = base_id(spec)
            log.info("loading the base model", base_model=config.base_model, base_id=base, dtype=config.dtype)
            device = open_device(
                directory,
                base_digest=base,
                dtype=config.dtype,
                sizes=sizes,
                clock=self._clock.monotonic,
                options=EngineOptions(
                    load_bytes_per_step=config.loads.bytes_per_step, dedicated=config.model.dedicated
                ),
                on_fault=_on_fault,
                max_context=config.model.max_context_tokens or None,
                model_path=config.model.path,
                cpu_products=config.model.cpu_products,
                compiled=config.model.compiled,
                threads=config.model.threads,
                device=config.model.device,
                graphs=CaptureBudget(seconds=config.model.graph_seconds, bytes=config.model.graph_bytes),
            )
        except (BaseModelError, ModelUnsupported, ValueError) as error:
            raise ConfigError(f"the base model cannot be served: {error}") from None
        self._base_bytes = _weights_bytes(spec, device.model.dtype.itemsize)
        log.info("base model loaded", decoder=device.model.path, seconds=round(self._clock.monotonic() - started, 1))
        return device, base

    async def stop(self) -> None:
        """Accepts nothing new, lets requests end for `drain_s`, then ends the rest and the device thread.

        Nothing is waited for that a stuck device thread would have to do.
        """
        device, stuck = self._device, self._stuck.is_set()
        if device is not None and not stuck:
            device.engine.drain()
        if self._servicer is not None:
            self._servicer.ask_to_end()
        await self._server.stop(0 if stuck else self._config.life.drain_s)
        tasks = [task for task in (self._reporting, self._keeping) if task is not None]
        await _end(tasks)
        if self._berths is not None:
            await self._berths.close()
        if device is not None and not stuck:
            await asyncio.to_thread(device.engine.close)
        if self._watchdog is not None:
            await asyncio.to_thread(self._watchdog.stop)
        await self._registry.close()
        await self._loader.close()
        await self._board.close()

    async def failed(self) -> None:
        """Returns when the device thread, or something that runs in the background, has ended by a fault.

        An executor that hears of no revocation any more must not look alive.
        """
        assert self._reporting is not None, "start comes first"
        assert self._keeping is not None, "start comes first"
        watched = {
            self._reporting,
            self._keeping,
            asyncio.create_task(self._registry.failed()),
            asyncio.create_task(self._device_failed(), name="device thread"),
        }
        try:
            await first_ended(watched)
        finally:
            for task in watched - {self._reporting, self._keeping}:
                task.cancel()

    async def _keep_needed(self, engine: Engine) -> None:
        while True:
            engine.keep(self._registry.needed())
            await self._registry.changed(KEEP_S)

    async def _device_failed(self) -> None:
        while self._device is None or not (self._stuck.is_set() or self._device.engine.state().failed):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stuck.wait(), WATCH_S)
        await self._server.set_serving(False)

    def _gone(self, items: list[RevisionItem]) -> None:
        if self._berths is not None:
            self._berths.gone(items)


def _weights_bytes(spec: BaseSpec, number_bytes: int) -> int:
    """Returns what a step reads of the base's matrices, as they are computed."""
    return sum(m.in_features * m.out_features for m in spec.modules) * number_bytes


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks until they have ended: the notice board's client, while it connects, swallows a cancellation."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)


def _on_fault(error: BaseException) -> None:
    log.error("a fault on the device thread", exc_info=error)


async def build(config: ExecutorConfig, *, last_resort: LastResort | None = None) -> ExecutorService:
    """Returns the service of a configuration, not started yet. `last_resort` ends the process when it cannot itself.

    Raises:
        ConfigError, OSError: something that the configuration names cannot be used.
    """
    if not is_id(config.name):
        raise ConfigError(f"name must be an id, not {config.name!r:.80}")
    try:
        trust = TrustStore.load(config.trust_dir, state_file=state_file(config.checkpoint.state_file))
    except TrustError as error:
        raise ConfigError(str(error)) from None
    return ExecutorService(config, trust=trust, clock=SystemClock(), last_resort=last_resort)
