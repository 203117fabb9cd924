"""Puts a loader together from its configuration, and runs it."""

import asyncio
import contextlib
import math
import tempfile

import structlog

from loraport.bundle.envelope import Signer
from loraport.loader.v1.loader_service_pb2_grpc import add_LoaderServiceServicer_to_server
from services.loader.bad_digests import BadDigests
from services.loader.config import LoaderConfig
from services.loader.conformance import check_store
from services.loader.disk_cache import DiskCache
from services.loader.fetch.http import Transport
from services.loader.fetch.limits import FetchLimits
from services.loader.handover import HandoverSocket
from services.loader.host_tier import HostTier
from services.loader.imports import Imports
from services.loader.intake import Intake, IntakeLimits
from services.loader.lane import Lane
from services.loader.ports import ObjectStore, RegistryPort
from services.loader.quota import ByteQuota
from services.loader.receive import MAX_CONFIG_BYTES, MIN_BYTES_PER_S, PATIENCE_S
from services.loader.registry_client import RegistryClient
from services.loader.resolve import Resolver
from services.loader.servicer import LoaderServicer
from services.loader.shell import HostLoader
from services.loader.slots import Slots
from services.loader.store import S3Store, read_credentials
from services.loader.turns import Turns
from services.shared import checks, metrics, telemetry
from services.shared.checkpoint import CheckpointKeeper, checkpoint_keys, prove_by
from services.shared.checks import Finding
from services.shared.clock import Clock, SystemClock
from services.shared.config import ConfigError
from services.shared.errors import LoraportError
from services.shared.names import is_id
from services.shared.rpc.channels import peer_channel
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import GRACE_S, OPEN_DOOR, Server
from services.shared.rpc.service import first_ended
from services.shared.rpc.telemetry import add_telemetry
from services.shared.trust import RoleSigner, TrustError, TrustStore, state_file

log = structlog.get_logger()

STORE_RETRY_S = 2.0
# A store that answers slowly does not hold up the start for longer: what is on the node's disk needs none.
STORE_WAIT_S = 10.0
# What grpc takes at most, 24 days.
LONGEST_MS = (1 << 31) - 1
# Leases are looked at this often, or four times in their life if that is more often.
EXPIRY_S = 5.0


class LoaderService:
    """A loader process: two addresses, one host tier, one intake."""

    def __init__(
        self,
        config: LoaderConfig,
        *,
        store: ObjectStore,
        registry: RegistryPort,
        trust: TrustStore,
        key: Signer,
        clock: Clock,
        transport: Transport,
    ) -> None:
        self._config = config
        self._store = store
        self._registry = registry
        self._trust, self._clock = trust, clock
        trusted = trust.keys("registry")
        node = config.node
        resolver = Resolver(registry, trusted)
        trust.on_change(resolver.forget_all)
        self._disk = None if node.disk_dir is None else DiskCache(node.disk_dir, node.disk_budget_bytes)
        turns = config.turns
        self.host = HostLoader(
            store=store,
            registry=registry,
            resolver=resolver,
            clock=clock,
            tier=HostTier(config.host_budget_bytes),
            bad=BadDigests(config.bad_digest_ttl_s),
            slots=Slots(turns.loads, per_key=turns.loads_per_tenant),
            lane=Lane("load", turns.loads + 1),  # and the copy to the node's disk
            disk=self._disk,
            hands_over=bool(node.handover_socket),
        )
        self._handover = HandoverSocket(node.handover_socket, self.host.hand_over) if node.handover_socket else None
        self.intake = Intake(
            store=store,
            registry=registry,
            key=key,
            trusted=trusted,
            clock=clock,
            turns=Turns(Slots(turns.uploads, per_key=turns.uploads_per_tenant)),
            lane=Lane("upload", turns.uploads),
            limits=_intake_limits(config),
            quota=ByteQuota(config.admission.tenant_bytes_per_day),
        )
        self._imports = Imports(
            self.intake, config.imports, transport=transport, clock=clock, max_fetches=turns.uploads
        )
        authorities = CertificateAuthorities.from_files(config.tls.service_ca, config.tls.admin_ca)
        self._server = Server(authorities, options=door(config, transport.limits))
        idle_s, socket = config.upload_idle_s, node.handover_socket
        servicer = LoaderServicer(self.host, self.intake, self._imports, upload_idle_s=idle_s, handover_socket=socket)
        self._server.add(add_LoaderServiceServicer_to_server, servicer)
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0
        self.upload_port = 0

    async def start(self) -> None:
        """Serves on both addresses; a store that is down is waited for in the background.

        Raises:
            OSError: an address, the hand-over socket's path or the disk tier's directory cannot be used.
        """
        if self._disk is not None:
            await asyncio.to_thread(self._disk.open)
        if self._handover is not None:
            self._handover.start()
        key, certificate = self._config.tls.read()
        self.port = self._server.listen(self._config.listen, key=key, certificate=certificate, clients=True)
        self.upload_port = self._server.listen(
            self._config.upload_listen, key=key, certificate=certificate, clients=False
        )
        self._registry.follow(self.host.gone)
        add_telemetry(self._server, "loader", self._checks(), clock=self._clock)
        await self._begin_preparing_store()
        self._expiring = asyncio.create_task(self._expire_leases(), name="leases")
        self._tasks.append(self._expiring)
        await self._server.start()

    async def stop(self) -> None:
        """Drains, lets uploads that are complete be judged, and gives all memory back."""
        await self._server.stop(self._config.drain_s)
        self._imports.close()
        await self.intake.close(self._config.drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._handover is not None:
            await self._handover.stop()
        await self.host.close()
        await self._registry.close()

    async def failed(self) -> None:
        """Returns when the catalog is no longer followed, or leases are no longer taken back, by a fault."""
        following = asyncio.create_task(self._registry.failed(), name="catalog")
        try:
            await first_ended([self._expiring, following])
        finally:
            following.cancel()

    async def sample(self) -> None:
        """Sets the gauges."""
        telemetry.gauge(metrics.CATALOG_EPOCH, self._registry.epoch)
        found = self.host.inventory()
        telemetry.gauge(metrics.LOADS_OPEN, len(found.loads))
        telemetry.gauge(metrics.HOST_BYTES, found.used_bytes, state="used")
        telemetry.gauge(metrics.HOST_BYTES, found.budget_bytes - found.used_bytes, state="free")
        telemetry.gauge(metrics.HOST_ENTRIES, len(found.entries))
        if found.seen is not None:
            telemetry.gauge(metrics.CHECKPOINT_AGE, self._clock.now() - found.seen[0].issued)

    def _checks(self) -> dict[str, checks.Check]:
        config = self._config

        async def store() -> Finding:
            return await asyncio.to_thread(check_store, self._store, f"{config.name}/doctor")

        return {
            "certificate": checks.certificate(config.tls.certificate, self._clock),
            "trust root": checks.trust_root(self._trust, self._clock),
            **self._registry.checks(self._clock),
            "store": store,
            "spool": checks.disk(config.spool_dir or tempfile.gettempdir()),
            **({} if config.node.disk_dir is None else {"disk tier": checks.disk(config.node.disk_dir)}),
        }

    async def _prepare_store(self) -> bool:
        try:
            await asyncio.to_thread(self._store.prepare)
            swept = await asyncio.to_thread(self.intake.sweep)
        except LoraportError as error:
            log.warning("store is not ready", reason=error.reason)
            return False
        if swept:
            log.warning("swept quarantine", count=swept)
        return True

    async def _begin_preparing_store(self) -> None:
        first = asyncio.create_task(self._prepare_store())
        await asyncio.wait([first], timeout=STORE_WAIT_S)
        if not (first.done() and first.result()):
            self._tasks.append(asyncio.create_task(self._prepare_store_later(first)))

    async def _prepare_store_later(self, first: asyncio.Task[bool]) -> None:
        ready = await first
        while not ready:
            await asyncio.sleep(STORE_RETRY_S)
            ready = await self._prepare_store()

    async def _expire_leases(self) -> None:
        ttl = self._config.lease_ttl_s
        while True:
            await asyncio.sleep(min(EXPIRY_S, ttl / 4))
            with contextlib.suppress(LoraportError):
                self.host.expire_leases(idle_s=ttl)


def door(config: LoaderConfig, fetches: FetchLimits) -> tuple[tuple[str, int], ...]:
    """Returns how long connections and their calls last: an upload or import that keeps the least rate is not cut, even
    if it begins when its connection reaches its age. What follows the last byte has the grace of every other call."""
    largest = config.admission.max_weights_bytes
    upload_s = PATIENCE_S + (largest + MAX_CONFIG_BYTES) / MIN_BYTES_PER_S
    import_s = fetches.total_s(MAX_CONFIG_BYTES) + fetches.total_s(largest)
    grace_s = GRACE_S + max(upload_s, import_s)
    return *OPEN_DOOR, ("grpc.max_connection_age_grace_ms", min(math.ceil(grace_s * 1000), LONGEST_MS))


def _intake_limits(config: LoaderConfig) -> IntakeLimits:
    return IntakeLimits(
        verifier=config.name,
        max_weights_bytes=config.admission.max_weights_bytes,
        spool_dir=config.spool_dir,
        max_update_norm=config.admission.max_update_norm or math.inf,
    )


async def build(config: LoaderConfig, *, transport: Transport | None = None) -> LoaderService:
    """Returns the service of a configuration, not started yet. `transport` is for tests of imports.

    Raises:
        ConfigError, OSError: something that the configuration names cannot be used.
    """
    if not is_id(config.name):
        raise ConfigError(f"name must be an id, not {config.name!r:.80}")
    try:
        trust = TrustStore.load(config.trust_dir, state_file=state_file(config.checkpoint.state_file))
        key = RoleSigner(config.signing_key, role="loader", trust=trust)
        key.require()
    except TrustError as error:
        raise ConfigError(str(error)) from None
    store = S3Store(
        config.s3_endpoint,
        read_credentials(config.s3_credentials),
        quarantine_bucket=config.s3_quarantine_bucket,
        verified_bucket=config.s3_verified_bucket,
        secure=config.s3_secure,
    )
    channel = peer_channel(config.registry_address, config.tls)
    keeper = CheckpointKeeper(
        prove_by(channel), trusted=checkpoint_keys(trust), policy=config.checkpoint, clock=SystemClock()
    )
    registry = RegistryClient(channel, keeper, on_root=trust.offer)
    return LoaderService(
        config,
        store=store,
        registry=registry,
        trust=trust,
        key=key,
        clock=SystemClock(),
        transport=transport or Transport(),
    )
