"""A running executor service over a tiny base, with a registry and a loader that say what the test wants."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from loraport.bundle.base import base_id
from loraport.bundle.base_dir import read_base_dir
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, SigningKey, sign_envelope
from loraport.bundle.manifest import build_manifest
from loraport.bundle.verify import verify_bundle
from loraport.dev.pki import make_ca, make_leaf
from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from loraport.loader.v1 import loader_service_pb2 as loader_pb
from loraport.loader.v1.loader_service_pb2_grpc import LoaderServiceServicer, add_LoaderServiceServicer_to_server
from loraport.registry.v1 import adapter_service_pb2 as adapters
from loraport.registry.v1 import catalog_service_pb2 as catalog
from loraport.registry.v1.catalog_service_pb2_grpc import CatalogServiceServicer, add_CatalogServiceServicer_to_server
from loraport.registry.v1.log_service_pb2_grpc import add_LogServiceServicer_to_server
from loraport.types.v1 import types_pb2
from services.executor.config import ExecutorConfig
from services.executor.service import ExecutorService, build
from services.router.executor_link import Link, LinkedRequest
from services.shared.config import from_mapping
from services.shared.errors import LoraportError
from services.shared.rpc.channels import TlsFiles
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from services.shared.statements import Record, Ticket, seal
from tests.support.roots import write_root
from tests.support.tiny import ALL, make_adapter, make_base
from tests.support.translog import FakeLog

State = adapters.Revision.State
TWO = ("one", "two")


@dataclass
class Published:
    """An adapter as registry and loader know it."""

    name: str
    tenant: str
    revision_id: str
    weights: bytes
    weights_digest: str
    manifest: bytes
    record: bytes
    leaf: int
    max_rank: int
    state: Any = State.STATE_ACTIVE
    shared: tuple[str, ...] = ()


@dataclass
class Peers(CatalogServiceServicer, LoaderServiceServicer):
    """A registry's catalog and a loader. Tests turn the knobs."""

    key: SigningKey = field(default_factory=SigningKey.generate)
    base: str = ""
    published: dict[str, Published] = field(default_factory=dict)
    epoch: int = 1
    served: dict[str, int] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    rollouts: list[catalog.CatalogRollout] = field(default_factory=list)
    refuse: str = ""
    # How many of the log's restrictions the catalog tells; None for all.
    withheld: int | None = None
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.hold.set()
        self.log = FakeLog(self.key)
        self.checkpoint: Callable[[], bytes] = lambda: self.log.checkpoint(self.epoch)

    def publish(self, base_dir: Path, adapter_dir: Path, *, tenant: str = "acme") -> Published:
        """Signs a saved adapter as publisher and registry would."""
        base = read_base_dir(base_dir)
        self.base = base_id(base)
        weights = (adapter_dir / "adapter_model.safetensors").read_bytes()
        verdict = verify_bundle((adapter_dir / "adapter_config.json").read_bytes(), weights, base=base, tenant=tenant)
        assert verdict.admitted, verdict.violations
        document = build_manifest(
            verdict,
            adapter=adapter_dir.name,
            version=1,
            created_time="2026-01-31T12:00:00Z",
            source={"kind": "upload", "uri": "test"},
        )
        record = Record(
            revision_id=str(verdict.revision_id),
            tenant=tenant,
            adapter=adapter_dir.name,
            version=1,
            base_id=self.base,
            weights_digest=str(verdict.weights_digest),
            weights_size=len(weights),
            state="ACTIVE",
            sequence=1,
            issued_time=int(time.time()),
        )
        envelope = seal(record, self.key)
        manifest = sign_envelope(IN_TOTO_PAYLOAD_TYPE, document, SigningKey.generate())
        done = Published(
            name=adapter_dir.name,
            tenant=tenant,
            revision_id=record.revision_id,
            weights=weights,
            weights_digest=record.weights_digest,
            manifest=manifest,
            record=envelope,
            leaf=self.log.record(f"tenants/{tenant}/adapters/{adapter_dir.name}/revisions/v1", envelope),
            max_rank=max(m.rank for m in verdict.modules),
        )
        self.published[done.revision_id] = done
        return done

    def publish_two(self, root: Path) -> list[str]:
        """Publishes the adapters of `two_adapters` and returns their revisions."""
        return [self.publish(root / "base", root / name).revision_id for name in TWO]

    async def tell(self) -> None:
        """Makes the followers see what changed."""
        async with self.changed:
            self.epoch += 1
            self.changed.notify_all()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            seen = self.epoch
            for p in self.published.values():
                self.log.share(f"tenants/{p.tenant}/adapters/{p.name}", p.shared)
            items = [
                catalog.CatalogItem(
                    revision=catalog.CatalogRevision(
                        revision_id=p.revision_id,
                        tenant=p.tenant,
                        adapter=p.name,
                        version=1,
                        state=p.state,
                        base_model="tiny",
                        weights_digest=p.weights_digest,
                        size_bytes=len(p.weights),
                        max_rank=p.max_rank,
                        record_envelope=p.record,
                        record_leaf=p.leaf,
                        shared_tenants=p.shared,
                    )
                )
                for p in self.published.values()
            ]
            items += [catalog.CatalogItem(rollout=rollout) for rollout in self.rollouts]
            items = self.log.told()[: self.withheld] + items
            yield catalog.WatchResponse(epoch=seen, items=items, synced=True, checkpoint=self.checkpoint())
            async with self.changed:
                await self.changed.wait_for(lambda: self.epoch > seen)  # noqa: B023 - waited for at once

    async def GetEpoch(self, request: Any, context: Any) -> Any:
        async with self.changed:  # what has not come yet comes now
            self.changed.notify_all()
        return catalog.GetEpochResponse(epoch=self.epoch)

    async def EnsureHost(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self.refuse:
            raise LoraportError(self.refuse)
        self.served[request.revision_id] = self.served.get(request.revision_id, 0) + 1
        yield loader_pb.EnsureHostResponse(stage=types_pb2.StageReport(stage=types_pb2.LOAD_STAGE_FETCH, elapsed_ms=3))
        await self.hold.wait()
        p = self.published[request.revision_id]
        lease = loader_pb.HostLease(
            lease_id=p.revision_id,
            weights_digest=p.weights_digest,
            size_bytes=len(p.weights),
            manifest_envelope=p.manifest,
            record_envelope=p.record,
        )
        yield loader_pb.EnsureHostResponse(lease=lease)

    async def ReadBlob(self, request: Any, context: Any) -> AsyncIterator[Any]:
        weights = self.published[request.lease_id].weights
        for start in range(0, len(weights), 1000):
            yield loader_pb.ReadBlobResponse(data=weights[start : start + 1000])

    async def ReleaseHost(self, request: Any, context: Any) -> Any:
        self.released.append(request.lease_id)
        return loader_pb.ReleaseHostResponse()


@dataclass
class Rig:
    """A running executor and a router's stub."""

    service: ExecutorService
    peers: Peers
    router_key: SigningKey
    stub: ExecutorServiceStub
    admin: ExecutorServiceStub
    # Requests go over one stream of it where it is set, as a router's do, and by a call each where not.
    link: Link | None = None

    def ticket(self, revision_id: str = "", *, key: SigningKey | None = None, **changes: Any) -> bytes:
        fields = {
            "tenant": "acme",
            "revision_id": revision_id,
            "base_id": self.peers.base,
            "expires": int(time.time()) + 55,
        }
        return seal(Ticket(**{**fields, **changes}), key or self.router_key)

    def call(
        self,
        prompt: tuple[int, ...],
        revision_id: str = "",
        *,
        ticket: bytes | None = None,
        request_id: str | None = None,
        timeout: float = 60,
        priority: int = 0,
        **sampling: Any,
    ) -> Any:
        params = types_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 12, **sampling})
        request = pb.ExecuteRequest(
            ticket=self.ticket(revision_id) if ticket is None else ticket,
            revision_id=revision_id,
            prompt_token_ids=prompt,
            sampling=params,
            priority=priority,
            request_id=next_id() if request_id is None else request_id,
        )
        if self.link is not None:
            return LinkedCall(self.link.begin(request, timeout_s=timeout, traceparent=""))
        return self.stub.Execute(request, timeout=timeout)

    async def answer(self, *arguments: Any, **options: Any) -> Answer:
        return await collect(self.call(*arguments, **options))

    async def state(self) -> Any:
        return await self.stub.State(pb.StateRequest(), timeout=60)


def next_id() -> str:
    """Returns an id that no request had."""
    return f"q{time.monotonic_ns()}"


def two_adapters(root: Path) -> Any:
    """Saves a base and two adapters of it in folders of `root`; returns the base."""
    base = make_base(root / "base")
    (root / "base" / "tokenizer.json").write_text("{}")
    for seed, name in enumerate(TWO):
        make_adapter(base, root / name, seed=seed, r=4, lora_alpha=8, target_modules=ALL)
    return base


def slowly(rig: Rig) -> None:
    """Makes every step take a twentieth of a second, so that what runs is still running once a test has looked."""
    runner = rig.service._device.engine._runner
    run = runner.run
    runner.run = lambda plan: (time.sleep(0.05), run(plan))[1]


@dataclass
class Answer:
    """A whole stream, checked for its order."""

    started: Any
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[Any]]
    finished: dict[int, Any]

    def take(self, event: Any) -> None:
        """Takes the next event."""
        match event.WhichOneof("event"):
            case "started":
                assert self.started is None
                self.started = event.started
            case "tokens":
                tokens = event.tokens
                assert self.started is not None
                assert tokens.index not in self.finished
                self.tokens.setdefault(tokens.index, []).extend(tokens.token_ids)
                self.logprobs.setdefault(tokens.index, []).extend(tokens.logprobs)
            case "finished":
                assert event.finished.index not in self.finished
                self.finished[event.finished.index] = event.finished


class LinkedCall:
    """A request of a link, to be read as a call is."""

    def __init__(self, request: LinkedRequest) -> None:
        self._request = request
        self.cancel = request.cancel

    async def __aiter__(self) -> AsyncIterator[pb.ExecuteResponse]:
        while events := await self._request.next():
            yield pb.ExecuteResponse(events=events)


async def collect(call: Any) -> Answer:
    """Reads a stream to its end."""
    answer = Answer(None, {}, {}, {})
    async for response in call:
        assert response.events
        for event in response.events:
            answer.take(event)
    return answer


@asynccontextmanager
async def running(tmp_path: Path, base_dir: Path, peers: Peers, **settings: Any) -> AsyncIterator[Rig]:
    """Starts the peers and the executor, and ends both."""
    ca, admin_ca, router_key = make_ca("services"), make_ca("admins"), SigningKey.generate()
    write_root(tmp_path / "trust", {"registry": peers.key, "router": router_key})
    (tmp_path / "ca.pem").write_bytes(ca.certificate)
    (tmp_path / "admin-ca.pem").write_bytes(admin_ca.certificate)
    for name in ("registry", "executor/executor-0", "router"):
        leaf = make_leaf(ca, uri=f"spiffe://loraport.local/service/{name}")
        (tmp_path / f"{name.split('/')[0]}.pem").write_bytes(leaf.certificate)
        (tmp_path / f"{name.split('/')[0]}.key").write_bytes(leaf.key)
    operator = make_leaf(admin_ca, uri="spiffe://loraport.local/admin/operator")
    files = TlsFiles(*(str(tmp_path / name) for name in ("registry.pem", "registry.key", "ca.pem", "admin-ca.pem")))
    server = Server(CertificateAuthorities.from_files(files.service_ca, files.admin_ca))
    server.add(add_CatalogServiceServicer_to_server, peers)
    server.add(add_LogServiceServicer_to_server, peers.log)
    server.add(add_LoaderServiceServicer_to_server, peers)
    key, certificate = files.read()
    port = server.listen("127.0.0.1:0", key=key, certificate=certificate, clients=True)
    await server.start()
    service = await build(_config(tmp_path, base_dir, port, **settings))
    try:
        await service.start()
    except BaseException:
        await server.stop(0)
        raise
    credentials = grpc.ssl_channel_credentials(
        ca.certificate, (tmp_path / "router.key").read_bytes(), (tmp_path / "router.pem").read_bytes()
    )
    address = f"127.0.0.1:{service.port}"
    channel = grpc.aio.secure_channel(address, credentials)
    admin_credentials = grpc.ssl_channel_credentials(ca.certificate, operator.key, operator.certificate)
    admin = grpc.aio.secure_channel(address, admin_credentials)
    try:
        yield Rig(service, peers, router_key, ExecutorServiceStub(channel), ExecutorServiceStub(admin))
    finally:
        await channel.close()
        await admin.close()
        await service.stop()
        await server.stop(0)


def _config(tmp_path: Path, base_dir: Path, peer_port: int, **settings: Any) -> ExecutorConfig:
    value = {
        "name": "executor-0",
        "listen": "127.0.0.1:0",
        "base_dir": str(base_dir),
        "base_model": "tiny",
        "tls": {
            "certificate": str(tmp_path / "executor.pem"),
            "key": str(tmp_path / "executor.key"),
            "service_ca": str(tmp_path / "ca.pem"),
            "admin_ca": str(tmp_path / "admin-ca.pem"),
        },
        "trust_dir": str(tmp_path / "trust"),
        "registry_address": f"127.0.0.1:{peer_port}",
        "loader_address": f"127.0.0.1:{peer_port}",
        "kv_bytes": 1 << 20,
        "pool_bytes": 1 << 22,
        "model": {"threads": 1},
        "life": {"drain_s": 2.0},
        "loads": {"timeout_s": 20.0},
        **settings,
    }
    return from_mapping(ExecutorConfig, json.loads(json.dumps(value)), where="test")
