"""A router as a real process would run it, between a registry and executors that the test plays.

Everything is real but the peers' rooms: TLS, identities, tickets, the catalog stream, the tokenizer.
"""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loraport import AsyncClient
from loraport.bundle.base import BaseModule, BaseSpec, base_id, to_json
from loraport.bundle.canonical import canonical
from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import SigningKey
from loraport.dev.pki import make_ca, make_leaf
from loraport.executor.v1 import executor_service_pb2 as epb
from loraport.executor.v1 import executor_service_pb2_grpc as executor_stubs
from loraport.registry.v1 import base_model_service_pb2 as bpb
from loraport.registry.v1 import base_model_service_pb2_grpc as base_stubs
from loraport.registry.v1 import catalog_service_pb2 as cpb
from loraport.registry.v1 import catalog_service_pb2_grpc as catalog_stubs
from loraport.registry.v1.adapter_service_pb2 import Revision
from loraport.types.v1 import types_pb2
from services.executor.many import Events, Many
from services.router.config import RouterConfig
from services.router.service import RouterService, build
from services.shared.config import from_mapping
from services.shared.errors import LoraportError
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from services.shared.statements import Record, Ticket, open_ticket, seal
from tests.support.ports import free_port
from tests.support.roots import write_root
from tests.support.translog import FakeLog

SERVICE_CA, ADMIN_CA = make_ca("service"), make_ca("admin")
PEPPER = b"p" * 32
CONTEXT = 64
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|assistant|>"


def api_key(tenant: str, number: int = 0) -> str:
    key_id = f"{tenant[:8]}{number:02d}".ljust(10, "0")
    return f"lk_{key_id}_" + "S" * 43


def write_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tokenizer


def digest(text: str) -> str:
    return sha256_digest(text.encode())


class FakeRegistry(catalog_stubs.CatalogServiceServicer, base_stubs.BaseModelServiceServicer):
    """The catalog stream and the base model's specification."""

    def __init__(self, spec: BaseSpec, key: SigningKey) -> None:
        self.spec, self.key = spec, key
        self.base_id = base_id(spec)
        self.items: list[cpb.CatalogItem] = []
        self.log = FakeLog(key)
        self._logged = 0  # items whose shares the log has
        self.epoch = 1
        self.held = False  # changes are kept back from watchers, as a slow network would
        self.asked = 0
        self._changed = asyncio.Condition()

    async def put(self, *items: cpb.CatalogItem) -> None:
        self.items.extend(items)
        self.epoch += 1
        async with self._changed:
            self._changed.notify_all()

    async def release(self) -> None:
        self.held = False
        async with self._changed:
            self._changed.notify_all()

    def _log_shares(self) -> None:
        for item in self.items[self._logged :]:
            if item.HasField("revision"):
                name = f"tenants/{item.revision.tenant}/adapters/{item.revision.adapter}"
                self.log.share(name, item.revision.shared_tenants)
        self._logged = len(self.items)

    async def Watch(self, request, context) -> AsyncIterator[cpb.WatchResponse]:
        sent = listed = 0
        while True:
            self._log_shares()
            seen, told = len(self.items), self.log.told()
            yield cpb.WatchResponse(epoch=self.epoch, items=told[listed:] + self.items[sent:seen], synced=True)
            sent, listed = seen, len(told)
            async with self._changed:
                await self._changed.wait_for(lambda: len(self.items) > seen and not self.held)  # noqa: B023

    async def GetEpoch(self, request, context) -> cpb.GetEpochResponse:
        self.asked += 1
        return cpb.GetEpochResponse(epoch=self.epoch)

    async def GetBaseModel(self, request, context) -> bpb.BaseModel:
        return bpb.BaseModel(name=request.name, base_id=self.base_id, spec_json=canonical(to_json(self.spec)))

    def base(self) -> cpb.CatalogItem:
        return cpb.CatalogItem(base_model=cpb.CatalogBaseModel(base_model="tiny", base_id=self.base_id))

    def tenant(self, tenant: str, *, base_allowed: bool = True) -> list[cpb.CatalogItem]:
        secret = api_key(tenant)
        key = cpb.CatalogKey(
            key_id=secret.split("_")[1],
            tenant=tenant,
            secret_hmac=hmac.new(PEPPER, secret.encode(), hashlib.sha256).digest(),
            scopes=["generate", "list"],
        )
        item = cpb.CatalogTenant(tenant=tenant, weight=1.0, base_allowed=base_allowed)
        return [cpb.CatalogItem(tenant=item), cpb.CatalogItem(key=key)]

    def revision(
        self, tenant: str, adapter: str, *, version: int = 1, state: str = "ACTIVE", shared: tuple[str, ...] = (),
        signed_by: SigningKey | None = None, rank: int = 8,
    ) -> cpb.CatalogRevision:  # fmt: skip
        revision_id = digest(f"{tenant}/{adapter}/{version}")
        record = Record(
            revision_id=revision_id, tenant=tenant, adapter=adapter, version=version, base_id=self.base_id,
            weights_digest=digest("w"), weights_size=10, state="ACTIVE", sequence=1, issued_time=1,
        )  # fmt: skip
        return cpb.CatalogRevision(
            revision_id=revision_id, tenant=tenant, adapter=adapter, version=version,
            state=Revision.State.Value(f"STATE_{state}"), base_model="tiny", weights_digest=digest("w"), size_bytes=10,
            max_rank=rank, shared_tenants=shared,
            record_envelope=seal(record, signed_by or self.key) if state == "ACTIVE" else b"",
        )  # fmt: skip

    def adapter(self, tenant: str, adapter: str, *, alias: str = "prod", **options) -> list[cpb.CatalogItem]:
        revision = self.revision(tenant, adapter, **options)
        pointer = cpb.CatalogAlias(tenant=tenant, adapter=adapter, alias=alias, revision_id=revision.revision_id)
        return [cpb.CatalogItem(revision=revision), cpb.CatalogItem(alias=pointer)]


@dataclass
class FakeExecutor(executor_stubs.ExecutorServiceServicer):
    """Answers every prompt with `reply`; the knobs break it."""

    name: str
    base_id: str
    trusted: dict[str, bytes]
    reply: list[int] = field(default_factory=lambda: [50, 51, 52])
    state: str = "SERVING"
    epoch: int = 1
    resident: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    held: asyncio.Event | None = None  # answers begin, and go on when it is set
    lingers: bool = False  # has told everything, and does not end
    load_ms: float = 0.0
    # All that there is to say goes in one message, no longer in one each.
    at_once: bool = False
    cached_tokens: int = 0
    fail_before: Callable[[], None] = lambda: None
    fail_after: int = -1
    began_with: str | None = None
    max_rank: int = 64
    refuse_preload: dict[str, str] = field(default_factory=dict)  # revision → reason
    preloaded: list[str] = field(default_factory=list)
    reference_off_by: float = 0.0
    requests: list[tuple[Ticket, epb.ExecuteRequest]] = field(default_factory=list)
    drains: int = 0
    running: int = 0
    most_running: int = 0
    cancelled: int = 0

    async def State(self, request, context) -> epb.StateResponse:
        revisions = [epb.DeviceRevision(revision_id=r, state="READY", size_bytes=7) for r in self.resident]
        return epb.StateResponse(
            executor=self.name, base_id=self.base_id, base_model="baseModels/tiny", epoch=self.epoch, sequence=1,
            state=self.state, revisions=revisions, max_rank=self.max_rank, max_context_tokens=CONTEXT,
            running_count=self.running,
        )  # fmt: skip

    async def Drain(self, request, context) -> epb.DrainResponse:
        assert request.at_once
        self.drains += 1
        self.state = "SERVING" if request.undrain else "DRAINING"
        return epb.DrainResponse(running_count=self.running)

    def ExecuteMany(self, messages, context) -> AsyncIterator[epb.ExecuteManyResponse]:
        return Many(self._execute).responses(messages)

    async def _execute(self, request, timeout_s) -> AsyncGenerator[Events, None]:
        ticket = open_ticket(request.ticket, self.trusted, now=time.time())
        # Who sees a request among the running ones may turn the knobs for the next: this one has what it came upon.
        pause_s, held = self.pause_s, self.held
        self.requests.append((ticket, request))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            self.fail_before()
            began = request.revision_id if self.began_with is None else self.began_with
            started = epb.ExecuteResponse.Started(
                revision_id=began, base_id=self.base_id, load_ms=self.load_ms, cached_token_count=self.cached_tokens
            )
            at_once = [said(started=started)]
            if not self.at_once:
                yield at_once.pop()
            async for events in self._answer(request, pause_s, held):
                at_once.append(events)
                if not self.at_once:
                    yield at_once.pop()
            if at_once:
                yield [event for events in at_once for event in events]
            if self.lingers:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def Probe(self, request, context) -> epb.ProbeResponse:
        ticket = open_ticket(request.ticket, self.trusted, now=time.time())
        pause_s = self.pause_s
        self.requests.append((ticket, request))
        self.running += 1
        try:
            self.fail_before()
            await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        top = [types_pb2.TokenLogprob(token_id=7, logprob=-0.25)] * request.top_logprobs
        return epb.ProbeResponse(
            logprobs=[
                types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=t, logprob=-0.5), top=top)
                for t in request.continuation_token_ids
            ],
            revision_id=request.revision_id if self.began_with is None else self.began_with,
            base_id=self.base_id, load_ms=self.load_ms, kernel_path="fake",
            usage=types_pb2.Usage(prompt_token_count=len(request.prompt_token_ids), cached_token_count=1),
            reference_logprobs=[self.reference_off_by - 0.5] * len(request.continuation_token_ids) * request.reference,
        )  # fmt: skip

    async def Preload(self, request, context) -> epb.PreloadResponse:
        ticket = open_ticket(request.ticket, self.trusted, now=time.time())
        assert ticket.revision_id == request.revision_id
        if request.revision_id in self.refuse_preload:
            raise LoraportError(self.refuse_preload[request.revision_id])
        self.preloaded.append(request.revision_id)
        if request.revision_id not in self.resident:
            self.resident.append(request.revision_id)
        return epb.PreloadResponse(revision_id=request.revision_id, load_ms=1.0, pinned=True)

    async def _answer(
        self, request: epb.ExecuteRequest, pause_s: float, held: asyncio.Event | None
    ) -> AsyncIterator[Events]:
        most = request.sampling.max_tokens
        if held is not None:
            await held.wait()
        for count, token in enumerate(self.reply[:most]):
            if count == self.fail_after:
                raise LoraportError("NON_FINITE_LOGITS")
            await asyncio.sleep(pause_s)
            logprobs = []
            if request.sampling.HasField("logprobs"):
                chosen = types_pb2.TokenLogprob(token_id=token, logprob=-0.5)
                logprobs = [types_pb2.PositionLogprobs(chosen=chosen, top=[chosen] * request.sampling.logprobs)]
            for index in range(request.sampling.n or 1):
                tokens = epb.ExecuteResponse.Tokens(
                    index=index, token_ids=[token], logprobs=logprobs, kernel_path="fake", max_batch_adapter_count=1
                )
                yield said(tokens=tokens)
        reason = types_pb2.FINISH_REASON_LENGTH if len(self.reply) >= most else types_pb2.FINISH_REASON_STOP
        for index in range(request.sampling.n or 1):
            usage = types_pb2.Usage(
                prompt_token_count=len(request.prompt_token_ids), completion_token_count=min(len(self.reply), most)
            )
            finished = epb.ExecuteResponse.Finished(
                index=index, finish_reason=reason, usage=usage, kernel_path="fake", max_batch_adapter_count=2
            )
            yield said(finished=finished)


def said(**event: Any) -> Events:
    """What an executor says of one event."""
    return [epb.ExecuteResponse.Event(**event)]


class World:
    """Files, peers and the router; `start` may leave peers out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = write_tokenizer(folder / "base")
        self.keys = {role: SigningKey.generate() for role in ("registry", "loader", "router")}
        tokenizer_digest = sha256_digest((folder / "base" / "tokenizer.json").read_bytes())
        self.spec = BaseSpec(
            weights_digest=digest("weights"), config_digest=digest("config"), tokenizer_digest=tokenizer_digest,
            dtype="F32", architecture="LlamaForCausalLM", tied_embeddings=False,
            vocab_size=self.tokenizer.get_vocab_size(), max_positions=CONTEXT,
            modules=(BaseModule("layers.0.q_proj", "linear", 8, 8),),
        )  # fmt: skip
        self.registry = FakeRegistry(self.spec, self.keys["registry"])
        self.executors: dict[str, FakeExecutor] = {}
        self.addresses: dict[str, str] = {}
        self.servers: dict[str, Server] = {}
        self.registry_services: list = []
        self.router: RouterService | None = None
        self.overrides: dict = {}
        self._write_files()

    def _write_files(self) -> None:
        files = {"ca.pem": SERVICE_CA[0], "admin-ca.pem": ADMIN_CA[0], "pepper": PEPPER}
        files["router.pem"], files["router.crt.key"] = self.leaf("service/router")
        write_root(self.folder, self.keys)
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        self.keys["router"].save(self.folder / "ticket.key")

    @staticmethod
    def leaf(path: str) -> tuple[bytes, bytes]:
        ca = ADMIN_CA if path.startswith("admin/") else SERVICE_CA
        return make_leaf(ca, uri=f"spiffe://loraport.local/{path}")

    async def serve(self, role: str, *registrations) -> str:
        """Serves where this role did before, if it did: its port is one that nobody is given by chance meanwhile."""
        address = self.addresses.get(role) or f"127.0.0.1:{free_port()}"
        server = Server(CertificateAuthorities({"service": SERVICE_CA[0], "admin": ADMIN_CA[0]}))
        for register, servicer in registrations:
            server.add(register, servicer)
        certificate, key = self.leaf(f"service/{role}")
        server.listen(address, key=key, certificate=certificate, clients=True)
        await server.start()
        self.servers[role] = server
        return address

    async def start_registry(self) -> None:
        self.addresses["registry"] = await self.serve(
            "registry",
            (catalog_stubs.add_CatalogServiceServicer_to_server, self.registry),
            (base_stubs.add_BaseModelServiceServicer_to_server, self.registry),
            *self.registry_services,
        )

    async def start_executor(self, name: str, **knobs) -> FakeExecutor:
        trusted = {self.keys["router"].key_id: self.keys["router"].public_pem}
        executor = self.executors.get(name) or FakeExecutor(name, self.registry.base_id, trusted, **knobs)
        self.executors[name] = executor
        self.addresses[name] = await self.serve(name, (executor_stubs.add_ExecutorServiceServicer_to_server, executor))
        return executor

    async def stop_server(self, name: str) -> None:
        await self.servers.pop(name).stop(0)

    def config(self) -> dict:
        names = [name for name in self.addresses if name != "registry"]
        return {
            "user_address": "127.0.0.1:0",
            "admin_address": "127.0.0.1:0",
            "registry_address": self.addresses["registry"],
            "executors": [{"name": n, "address": self.addresses[n], "base_model": "tiny"} for n in names],
            "tokenizers": {"tiny": str(self.folder / "base")},
            "tls": {
                "certificate": str(self.folder / "router.pem"),
                "key": str(self.folder / "router.crt.key"),
                "service_ca": str(self.folder / "ca.pem"),
                "admin_ca": str(self.folder / "admin-ca.pem"),
            },
            "trust_dir": str(self.folder),
            "signing_key": str(self.folder / "ticket.key"),
            "pepper_file": str(self.folder / "pepper"),
            "executor_wait_s": 0.3,
            "poll_interval_s": 0.1,
            "life": {"drain_s": 0.2},
            **self.overrides,
        }

    async def start_router(self) -> None:
        self.router = await build(from_mapping(RouterConfig, self.config(), where="test"))
        await self.router.start()
        catalog, fault = self.router._catalog, self.router._fleet.members.fault
        await eventually(lambda: catalog.view.synced or "registry" not in self.servers)
        unheard = ("has not answered yet", "its base model is not registered")
        running = self.executors.keys() & self.servers.keys()
        await eventually(lambda: not any(fault(name) in unheard for name in running))

    async def put(self, *items: cpb.CatalogItem) -> None:
        """Changes the catalog, and waits until the router has heard of it."""
        await self.registry.put(*items)
        await eventually(lambda: self.router._catalog.view.epoch >= self.registry.epoch)

    async def stop(self) -> None:
        if self.router is not None:
            await self.router.stop()
        for server in self.servers.values():
            await server.stop(0)

    def client(self, tenant: str = "acme", *, key: str | None = None, timeout: float | None = 60.0) -> AsyncClient:
        return AsyncClient(
            f"127.0.0.1:{self.router.user_port}",
            api_key=key or api_key(tenant),
            ca_certificate=self.folder / "ca.pem",
            timeout=timeout,
            tenant=tenant,
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


async def eventually(condition: Callable[[], object], seconds: float = 180.0) -> None:
    """Waits until something holds; how long it takes is not what a test is about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
