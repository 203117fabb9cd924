"""The router as a process: everything wired together, started and stopped."""

import asyncio
import uuid
from functools import partial
from pathlib import Path

import grpc
import structlog

from loraport.router.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from loraport.router.v1.router_admin_service_pb2_grpc import add_RouterAdminServiceServicer_to_server
from services.router.admin_servicer import RouterAdminServicer
from services.router.admission import Admission
from services.router.auth import Doorkeeper
from services.router.bases import Bases
from services.router.catalog_view import RecordChecker
from services.router.config import RouterConfig
from services.router.dispatch import Dispatch
from services.router.door import Door
from services.router.exchange import Exchange
from services.router.executor_client import ExecutorClient
from services.router.fair_queue import FairQueue
from services.router.fleet import Fleet
from services.router.gauges import Gauges
from services.router.issuers import IssuerKeys
from services.router.ledger import Ledger
from services.router.measure import Meter
from services.router.members import Members
from services.router.observing import Observer
from services.router.passage import RelayParts
from services.router.prices import PriceBook, Prices
from services.router.quota import Quotas
from services.router.quota_board import QuotaBoard
from services.router.rollout_agent import AgentParts, RolloutAgent
from services.router.rollout_desk import RolloutDesk
from services.router.rollout_losses import Losses
from services.router.rollout_probes import Probes
from services.router.rollout_split import Conversations
from services.router.servicer import InferenceServicer
from services.router.shadows import Shadows
from services.router.shared_work import SharedWork
from services.router.text import BaseText, TextError
from services.router.tickets import Tickets
from services.router.tokens import TokenChecker
from services.shared import checks
from services.shared.board import Board
from services.shared.catalog import CatalogView, RevisionItem
from services.shared.catalog_client import CatalogClient
from services.shared.clock import SystemClock
from services.shared.config import ConfigError
from services.shared.paging import PageTokens
from services.shared.rpc.channels import peer_channel
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import OPEN_DOOR, Server
from services.shared.rpc.service import first_ended
from services.shared.rpc.telemetry import add_telemetry
from services.shared.trust import RoleSigner, TrustError, TrustStore

log = structlog.get_logger()

# How often a router that waits for its first catalog says so.
SYNC_LOG_S = 10.0
MIN_PEPPER_BYTES = 32


class RouterService:
    """See `services.shared.rpc.service.Service`. It starts without registry, executors or notice board."""

    def __init__(self, config: RouterConfig, texts: dict[str, BaseText]) -> None:
        """Reads every file that the configuration names. Raises OSError or ConfigError."""
        self._config = config
        self._clock = SystemClock()
        self._tls = config.tls.read()
        pepper, signing_key, trust = _secrets(config)
        self._trust = trust
        registry = peer_channel(config.registry_address, config.tls)
        executors = {e.name: (e.base_model, peer_channel(e.address, config.tls)) for e in config.executors}
        self._channels = [registry, *(channel for _, channel in executors.values())]
        self._catalog = CatalogClient(registry, artefacts_only=False, on_root=trust.offer)
        self._board = Board(config.valkey_url)
        self._bases = Bases(texts, catalog=self._catalog, channel=registry)
        dispatch, losses = _dispatch(config), Losses()
        self._fleet = self._make_fleet({name: channel for name, (_, channel) in executors.items()}, dispatch, losses)
        self._exchange = Exchange(self._board, SharedWork(dispatch.ledger, router=uuid.uuid4().hex), clock=self._clock)
        self._gauges = Gauges(
            self._board, dispatch.needs, dispatch.popularity, router=uuid.uuid4().hex, clock=self._clock
        )
        self._admission = Admission(dispatch, clock=self._clock, executor_wait_s=config.executor_wait_s)
        life, tickets = config.life, Tickets(signing_key, self._clock.now)
        relays = RelayParts(
            self._admission, self._fleet, tickets, self._clock, life.max_request_s, life.max_unread_s, losses
        )
        conversations, observer = Conversations(), Observer(clock=self._clock)
        door = self._make_door(trust, conversations, losses)
        self._shadows = Shadows(dispatch, self._catalog, relays, observer)
        self._agent = self._make_agent(registry, tickets, observer, conversations, dispatch, losses)
        pages = PageTokens(pepper, purpose="router")
        quotas = Quotas(self._clock.monotonic)
        self._quota_board = _quota_board(config, quotas, self._catalog, self._clock)
        self._checker = TokenChecker(IssuerKeys(issuer, now=self._clock.monotonic) for issuer in config.token_issuers)
        keeper = Doorkeeper(self._catalog, pepper=pepper, now=self._clock.now, tokens=self._checker)
        self._meter = Meter(
            dispatch, self._catalog, objectives=config.objectives, max_running=config.max_running, clock=self._clock
        )
        inference = InferenceServicer(
            door,
            relays,
            self._catalog,
            quotas,
            tokens=pages,
            clock=self._clock,
            meter=self._meter,
            observer=observer,
            shadows=self._shadows,
        )
        admin = RouterAdminServicer(
            self._catalog,
            self._fleet,
            dispatch,
            quotas,
            max_running=config.max_running,
            key_uses=keeper.last_use,
            clock=self._clock,
        )
        self._user, self._admin = self._make_planes(keeper, inference, admin)
        self._syncing: asyncio.Task[None] | None = None
        self.user_port = 0
        self.admin_port = 0

    def _make_fleet(self, channels: dict[str, grpc.aio.Channel], dispatch: Dispatch, losses: Losses) -> Fleet:
        return Fleet(
            {name: ExecutorClient(channel) for name, channel in channels.items()},
            dispatch.members,
            board=self._board,
            base_id=self._bases.base_id,
            prices=dispatch.prices,
            interval_s=self._config.poll_interval_s,
            clock=self._clock,
            on_restart=dispatch.locality.lost,
            on_lost=losses.lost,
            on_answered=losses.answered,
        )

    def _make_door(self, trust: TrustStore, conversations: Conversations, losses: Losses) -> Door:
        records = RecordChecker(trust.keys("registry"), on_refused=_log_refused)
        trust.on_change(records.forget)
        return Door(
            self._catalog,
            records,
            self._bases,
            self._fleet,
            max_prompt_tokens=self._config.max_prompt_tokens,
            max_tokens=self._config.max_tokens,
            now=self._clock.monotonic,
            conversations=conversations,
            losses=losses,
        )

    def _make_planes(
        self, keeper: Doorkeeper, inference: InferenceServicer, admin: RouterAdminServicer
    ) -> tuple[Server, Server]:
        authorities = CertificateAuthorities.from_files(self._config.tls.service_ca, self._config.tls.admin_ca)
        user_plane = Server(authorities, authenticate_user=keeper, options=OPEN_DOOR)
        user_plane.add(add_InferenceServiceServicer_to_server, inference)
        admin_plane = Server(authorities)
        admin_plane.add(add_RouterAdminServiceServicer_to_server, admin)
        add_telemetry(admin_plane, "router", self._checks(), clock=self._clock)
        return user_plane, admin_plane

    async def start(self) -> None:
        """Binds and serves. Health says SERVING once the catalog has arrived, which may be later."""
        key, certificate = self._tls
        self.user_port = self._user.listen(self._config.user_address, key=key, certificate=certificate, clients=False)
        self.admin_port = self._admin.listen(self._config.admin_address, key=key, certificate=certificate, clients=True)
        self._catalog.start()
        self._bases.start()
        self._fleet.start()
        self._admission.start()
        self._quota_board.start()
        self._exchange.start()
        self._gauges.start()
        self._agent.start()
        await self._user.start(serving=False)
        await self._admin.start()
        self._syncing = asyncio.create_task(self._serve_when_synced())

    async def stop(self) -> None:
        """Lets running requests end, then stops everything else."""
        if self._syncing is not None:
            self._syncing.cancel()
        await asyncio.gather(self._user.stop(self._config.life.drain_s), self._admin.stop(1.0))
        await self._shadows.stop()
        await self._agent.stop()
        await self._quota_board.stop()
        await self._checker.stop()
        await self._admission.stop()
        await self._exchange.stop()
        await self._gauges.stop()
        await self._fleet.stop()
        await self._bases.stop()
        await self._catalog.stop()
        await self._board.close()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def failed(self) -> None:
        """Returns when something that runs in the background has ended, which only a bug can do.

        A router that no longer follows the catalog or its executors must not look alive.
        """
        catalog = asyncio.create_task(self._catalog.failed())
        background = (
            self._fleet,
            self._bases,
            self._admission,
            self._exchange,
            self._gauges,
            self._quota_board,
            self._agent,
        )
        tasks = {catalog, *(task for part in background for task in part.tasks)}
        await first_ended(tasks)

    async def sample(self) -> None:
        """Sets the gauges."""
        self._meter.sample()

    def _checks(self) -> dict[str, checks.Check]:
        config = self._config
        return {
            "certificate": checks.certificate(config.tls.certificate, self._clock),
            "trust root": checks.trust_root(self._trust, self._clock),
            "catalog": checks.catalog_synced(self._catalog),
            "notice board": self._board.check,
            "executors": self._meter.check_executors,
        }

    def _make_agent(
        self,
        registry: grpc.aio.Channel,
        tickets: Tickets,
        observer: Observer,
        conversations: Conversations,
        dispatch: Dispatch,
        losses: Losses,
    ) -> RolloutAgent:
        desk = RolloutDesk(registry, router=f"router-{uuid.uuid4().hex[:12]}", started=self._clock.now())
        parts = AgentParts(
            self._catalog,
            self._fleet,
            self._bases,
            desk,
            observer.outboxes,
            Probes(self._admission, self._fleet, tickets, self._clock),
            losses,
            self._clock,
            forget=partial(_forget, conversations, dispatch),
        )
        return RolloutAgent(parts)

    async def _serve_when_synced(self) -> None:
        while not await self._catalog.wait_synced(SYNC_LOG_S):
            log.warning("waiting for the registry's catalog")
        await self._user.set_serving(True)
        log.info("catalog has arrived", epoch=self._catalog.view.epoch)


def _forget(conversations: Conversations, dispatch: Dispatch, view: CatalogView) -> None:
    """Drops what is kept of rollouts that have ended."""
    conversations.forget(view)
    dispatch.close_accounts({item.name for item in view.rollouts.values()})


def _dispatch(config: RouterConfig) -> Dispatch:
    ledger = Ledger()
    queue = FairQueue(
        ledger, max_queued=config.max_queued, max_running=config.max_running, residence_s=config.queue_residence_s
    )
    members = Members(
        {executor.name: executor.base_model for executor in config.executors},
        window=config.executor_window,
        reserve=config.reserved_places,
    )
    return Dispatch(queue, members, ledger, PriceBook(Prices()))


async def build(config: RouterConfig) -> RouterService:
    """Returns the service of a configuration.

    Raises:
        ConfigError: a file that it names cannot be used.
        OSError: a file that it names cannot be read.
    """
    try:
        texts = {
            name: await asyncio.to_thread(BaseText.load, directory) for name, directory in config.tokenizers.items()
        }
    except TextError as error:
        raise ConfigError(str(error)) from None
    return RouterService(config, texts)


def _quota_board(config: RouterConfig, quotas: Quotas, catalog: CatalogClient, clock: SystemClock) -> QuotaBoard:
    return QuotaBoard(
        config.valkey_url,
        quotas,
        quota_of=lambda tenant: catalog.view.quota_of(tenant),
        router=uuid.uuid4().hex,
        now=clock.monotonic,
    )


def _secrets(config: RouterConfig) -> tuple[bytes, RoleSigner, TrustStore]:
    pepper = Path(config.pepper_file).read_bytes()
    if len(pepper) < MIN_PEPPER_BYTES:
        raise ConfigError(f"{config.pepper_file} holds less than {MIN_PEPPER_BYTES} bytes")
    try:
        trust = TrustStore.load(config.trust_dir, state_file=config.root_state_file)
        signer = RoleSigner(config.signing_key, role="router", trust=trust)
        signer.require()
    except TrustError as error:
        raise ConfigError(str(error)) from None
    return pepper, signer, trust


def _log_refused(item: RevisionItem, why: str) -> None:
    log.error("revision's record refused", revision_id=item.revision_id, why=why)
