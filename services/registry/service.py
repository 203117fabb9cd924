"""The registry as a process: builds the parts, migrates, serves, follows the epoch, drains."""

import asyncio
from collections import Counter
from pathlib import Path

import structlog
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from loraport.registry.v1 import (
    adapter_service_pb2_grpc,
    audit_service_pb2_grpc,
    base_model_service_pb2_grpc,
    catalog_service_pb2_grpc,
    key_service_pb2_grpc,
    log_service_pb2_grpc,
    rollout_service_pb2_grpc,
    tenant_service_pb2_grpc,
    trust_service_pb2_grpc,
)
from services.registry.anchors import Anchors
from services.registry.checkpoints import Checkpoints
from services.registry.config import RegistryConfig
from services.registry.delegating import Delegating
from services.registry.desk import Desk
from services.registry.hub import EpochHub
from services.registry.ports import EpochListener, Randomness, SystemRandomness
from services.registry.publishing import Limits, Publishing
from services.registry.refusals import Refusal
from services.registry.roots import Roots
from services.registry.servicers.adapter import AdapterServicer
from services.registry.servicers.audit import AuditServicer
from services.registry.servicers.base_model import BaseModelServicer
from services.registry.servicers.catalog import CatalogServicer
from services.registry.servicers.key import KeyServicer
from services.registry.servicers.log import LogServicer
from services.registry.servicers.pointing import Pointing
from services.registry.servicers.rollout import RolloutServicer
from services.registry.servicers.tenant import TenantServicer
from services.registry.servicers.trust import TrustServicer
from services.registry.store import rollouts
from services.registry.store.database import Database
from services.registry.store.migrate import upgrade
from services.registry.store.revisions import count_states
from services.registry.ticker import RolloutTicker
from services.shared import checks, metrics, telemetry
from services.shared.checks import Finding
from services.shared.clock import Clock, SystemClock
from services.shared.config import ConfigError
from services.shared.errors import LoraportError
from services.shared.paging import PageTokens
from services.shared.rpc.guard import Call
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server, run_blocking
from services.shared.rpc.service import first_ended
from services.shared.rpc.telemetry import add_telemetry
from services.shared.trust import RoleSigner, TrustError, TrustStore

log = structlog.get_logger()

MIN_PEPPER = 32


class RegistryService:
    """A registry. `port` is set once it serves."""

    def __init__(
        self, config: RegistryConfig, *, clock: Clock | None = None, randomness: Randomness | None = None
    ) -> None:
        """Reads keys and certificates.

        Raises:
            ConfigError: a setting or a file cannot be used.
            OSError: a file cannot be read.
        """
        self._config = config
        self._clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        try:
            self._trust = TrustStore.load(config.trust_dir, clock=self._clock)
        except TrustError as error:
            raise ConfigError(str(error)) from None
        self._key = RoleSigner(config.signing_key_file, role="registry", trust=self._trust)
        timestamp = RoleSigner(
            config.timestamp_key_file or config.signing_key_file, role="timestamp", trust=self._trust
        )
        self._signers = (self._key, timestamp)
        self._pepper = Path(config.pepper_file).read_bytes()
        if len(self._pepper) < MIN_PEPPER:
            raise ConfigError(f"pepper_file must hold at least {MIN_PEPPER} bytes")
        try:
            self._database = Database(config.database_url)
            authorities = CertificateAuthorities.from_files(config.tls.service_ca, config.tls.admin_ca)
        except (ValueError, SQLAlchemyError) as error:
            raise ConfigError(str(error).splitlines()[0]) from None
        self._roots = Roots(self._database, self._trust)
        self._desk = Desk(self._database, self._clock, request_life_s=config.request_life_s)
        self._server = Server(authorities, on_refused=self._refused)
        self._hub = EpochHub()
        self._checkpoints = Checkpoints(
            self._database,
            timestamp,
            self._hub,
            self._clock,
            life_s=config.checkpoint_life_s,
            interval_s=config.checkpoint_interval_s,
            state_file=config.state_file,
        )
        self._anchors = Anchors(self._database, self._clock, interval_s=config.checkpoint_interval_s)
        self._rollouts = RolloutTicker(self._database, self._clock, interval_s=config.rollout_interval_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._counted_epoch = -1
        self._auditing: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        """Migrates the database, binds the address and serves.

        Raises:
            ConfigError: the database cannot be used.
            OSError: the address is taken.
        """
        await run_blocking(self._prepare_database)
        for signer in self._signers:
            try:
                signer.require()
            except TrustError as error:
                raise ConfigError(str(error)) from None
        self._database.listen(self._announcer(asyncio.get_running_loop()))
        self._hub.advance(await run_blocking(self._database.epoch))
        self._add_servicers()
        add_telemetry(self._server, "registry", self._checks(), clock=self._clock)
        key, certificate = self._config.tls.read()
        self.port = self._server.listen(self._config.listen, key=key, certificate=certificate, clients=True)
        await self._server.start()
        running = {
            "epoch": self._follow_epoch(),
            "checkpoints": self._checkpoints.run(),
            "anchors": self._anchors.run(),
            "rollouts": self._rollouts.run(),
        }
        self._tasks = [asyncio.create_task(work, name=name) for name, work in running.items()]

    async def stop(self) -> None:
        """Ends the watches, lets running calls end, closes the database."""
        self._hub.close()
        await self._server.stop(self._config.drain_s)
        self._audit(self._desk.expired(now=None))
        await asyncio.gather(*self._auditing)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._database.close()

    async def failed(self) -> None:
        """Returns when the server, or what it does in the background, has ended without being asked to."""
        serving = asyncio.create_task(self._server.wait(), name="server")
        try:
            await first_ended([serving, *self._tasks])
        finally:
            serving.cancel()

    async def sample(self) -> None:
        """Sets the gauges."""
        telemetry.gauge(metrics.CATALOG_EPOCH, self._hub.epoch)
        last = self._checkpoints.last
        if last is not None:
            telemetry.gauge(metrics.CHECKPOINT_AGE, self._clock.now() - last.issued)
            telemetry.gauge(metrics.LOG_SIZE, last.tree_size)
        if self._counted_epoch != self._hub.epoch:  # counting reads the index of all revisions
            self._counted_epoch = self._hub.epoch
            revisions, running = await run_blocking(self._count_states)
            for state in metrics.REGISTRY_REVISIONS.labels["state"]:
                telemetry.gauge(metrics.REGISTRY_REVISIONS, revisions.get(state, 0), state=state)
            for state in metrics.ROLLOUTS.labels["state"]:
                telemetry.gauge(metrics.ROLLOUTS, running[state], state=state)

    def _count_states(self) -> tuple[dict[str, int], Counter[str]]:
        with self._database.read() as view:
            return count_states(view), Counter(row.position.state.value for row in rollouts.running(view))

    def _checks(self) -> dict[str, checks.Check]:
        async def database() -> Finding:
            epoch = await run_blocking(self._database.epoch)
            return Finding("GOOD", f"answers, epoch {epoch}")

        async def newest() -> Finding:
            last, now = self._checkpoints.last, self._clock.now()
            if last is None or last.expires <= now:
                return Finding("BAD", "none is signed now", "see the registry's log: its signer or its database fails")
            return Finding("GOOD", f"{now - last.issued:.0f} s old, {last.tree_size} leaves")

        found = {
            "certificate": checks.certificate(self._config.tls.certificate, self._clock),
            "trust root": checks.trust_root(self._trust, self._clock),
            "database": database,
            "checkpoint": newest,
        }
        folder = self._database.folder
        return found if folder is None else {**found, "database's disk": checks.disk(folder)}

    def _refused(self, call: Call, error: LoraportError) -> None:
        telemetry.count(metrics.CALLS_REFUSED, reason=error.reason)
        refusal = Refusal(
            principal=call.principal.label, method=call.method, reason=error.reason, request_id=call.request_id
        )
        self._audit(self._desk.note(refusal))

    def _audit(self, refusals: list[Refusal]) -> None:
        if refusals:
            task = asyncio.create_task(self._desk.refuse(refusals))
            self._auditing.add(task)
            task.add_done_callback(self._auditing.discard)

    def _announcer(self, loop: asyncio.AbstractEventLoop) -> EpochListener:
        def announce(epoch: int) -> None:
            loop.call_soon_threadsafe(self._hub.advance, epoch)

        return announce

    def _prepare_database(self) -> None:
        try:
            upgrade(self._database)
            self._roots.prepare(now_us=self._desk.now_us())
        except LoraportError as error:
            cause = getattr(error.__cause__, "orig", None) or error.message
            raise ConfigError(f"database_url: {str(cause).splitlines()[0]}") from None
        except (DBAPIError, CommandError) as error:
            raise ConfigError(f"database_url: {str(error).splitlines()[0]}") from None

    def _add_servicers(self) -> None:
        config = self._config
        desk = self._desk
        tokens = PageTokens(self._pepper, purpose="registry")
        limits = Limits(
            max_weights_bytes=config.max_weights_bytes,
            max_rank=config.max_rank,
            session_life_s=config.session_life_s,
        )
        publishing = Publishing(
            self._key, self._trust.keys("loader"), self._randomness, limits, refresh=self._roots.refresh
        )
        add = self._server.add
        add(tenant_service_pb2_grpc.add_TenantServiceServicer_to_server, TenantServicer(desk, tokens))
        add(
            key_service_pb2_grpc.add_KeyServiceServicer_to_server,
            KeyServicer(
                desk, tokens, self._randomness, self._pepper, Delegating(self._key, refresh=self._roots.refresh)
            ),
        )
        add(base_model_service_pb2_grpc.add_BaseModelServiceServicer_to_server, BaseModelServicer(desk, tokens))
        add(
            adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server,
            AdapterServicer(desk, tokens, publishing, Pointing(desk, self._randomness)),
        )
        add(
            catalog_service_pb2_grpc.add_CatalogServiceServicer_to_server,
            CatalogServicer(self._database, self._hub, self._checkpoints),
        )
        add(audit_service_pb2_grpc.add_AuditServiceServicer_to_server, AuditServicer(desk, tokens))
        add(log_service_pb2_grpc.add_LogServiceServicer_to_server, LogServicer(desk, tokens, self._checkpoints))
        add(trust_service_pb2_grpc.add_TrustServiceServicer_to_server, TrustServicer(desk, tokens, self._roots))
        add(
            rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server,
            RolloutServicer(desk, tokens, self._randomness),
        )

    async def _follow_epoch(self) -> None:
        """Hears of changes that another registry on the same database made."""
        while True:
            await asyncio.sleep(self._config.poll_interval_s)
            self._audit(self._desk.expired(now=self._clock.monotonic()))
            try:
                await run_blocking(self._roots.follow)
                self._hub.advance(await run_blocking(self._database.epoch))
            except LoraportError as error:
                log.warning("epoch not read", reason=error.reason)
