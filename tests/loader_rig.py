"""A loader with everything around it: a real S3 server, a registry that tells what the test wants, real keys."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from loraport.bundle.base import BaseSpec, base_id, to_json
from loraport.bundle.canonical import canonical
from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, SigningKey, sign_envelope
from loraport.bundle.manifest import build_manifest
from loraport.bundle.verify import verify_bundle
from loraport.dev.commands import S3_OPTIONS
from loraport.dev.pki import make_ca, make_leaf
from loraport.loader.v1 import loader_service_pb2 as pb
from loraport.loader.v1.loader_service_pb2_grpc import LoaderServiceStub
from loraport.registry.v1 import adapter_service_pb2 as adapters
from loraport.registry.v1 import base_model_service_pb2 as bases
from loraport.registry.v1 import catalog_service_pb2 as catalog
from loraport.registry.v1.adapter_service_pb2_grpc import AdapterServiceServicer, add_AdapterServiceServicer_to_server
from loraport.registry.v1.base_model_service_pb2_grpc import (
    BaseModelServiceServicer,
    add_BaseModelServiceServicer_to_server,
)
from loraport.registry.v1.catalog_service_pb2_grpc import CatalogServiceServicer, add_CatalogServiceServicer_to_server
from loraport.registry.v1.log_service_pb2_grpc import add_LogServiceServicer_to_server
from services.loader.config import LoaderConfig
from services.loader.fetch.http import Transport
from services.loader.ports import Area
from services.loader.service import LoaderService, build
from services.loader.store import S3Store, verified_key
from services.shared.config import from_mapping
from services.shared.errors import LoraportError
from services.shared.rpc.channels import TlsFiles
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from services.shared.rpc.status import from_rpc_error
from services.shared.statements import Record, UploadSession, Verification, open_statement, seal
from tests.bundle_files import config, encode, small_base, tensors, weights
from tests.support.disks import tiny_folder as tiny_folder
from tests.support.ports import free_port
from tests.support.roots import write_root
from tests.support.translog import FakeLog

ROOT = Path(__file__).resolve().parent.parent
ACCESS, SECRET = "loraport-test", "a-secret-of-some-length"
State = adapters.Revision.State


@contextmanager
def s3_server(folder: Path, address: str = "") -> Iterator[str]:
    """Runs `rclone serve s3` over a folder and yields its address."""
    address = address or f"127.0.0.1:{free_port()}"
    binary = Path(sys.executable).with_name("rclone")
    keys = ("--auth-key", f"{ACCESS},{SECRET}")
    command = [str(binary), "serve", "s3", "--addr", address, *keys, *S3_OPTIONS, str(folder)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    try:
        ends = time.monotonic() + 60
        while True:
            try:
                s3_store(address).prepare()
                break
            except LoraportError:
                assert process.poll() is None, "rclone ended at once"
                assert time.monotonic() < ends, "rclone does not answer"
                time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def s3_store(address: str) -> S3Store:
    return S3Store(address, (ACCESS, SECRET), quarantine_bucket="quarantine", verified_bucket="verified")


def stored(folder: Path, area: Area) -> list[str]:
    """Lists what lies in a bucket of the folder that an S3 server serves."""
    bucket = folder / area
    # os.walk does not mind folders that vanish meanwhile.
    return sorted(str(Path(top, name).relative_to(bucket)) for top, _, names in os.walk(bucket) for name in names)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was registered: its bytes and everything signed about them."""

    config: bytes
    weights: bytes
    revision_id: str
    manifest: bytes
    session: UploadSession

    @property
    def digest(self) -> str:
        return self.session.weights_digest


class FakeRegistry(AdapterServiceServicer, BaseModelServiceServicer, CatalogServiceServicer):
    """Answers the loader's calls from plain dicts. `admitted` are the verifications that came in."""

    def __init__(self, key: SigningKey, loader_key: SigningKey, base: BaseSpec) -> None:
        self.key = key
        self.base = base
        self.publisher = SigningKey.generate()
        self.revisions: dict[str, adapters.Revision] = {}
        self.records: dict[str, bytes] = {}
        self.leaves: dict[str, int] = {}
        self.admitted: list[Verification] = []
        self.epoch = 1
        self.admit_hook: Callable[[], None] = lambda: None
        self._loader_keys = {loader_key.key_id: loader_key.public_pem}
        self._changed = asyncio.Condition()
        self.log = FakeLog(key)
        # How many of the log's restrictions the catalog tells; None for all.
        self.withheld: int | None = None
        self.checkpoint: Callable[[], bytes] = lambda: self.log.checkpoint(self.epoch)

    def register(self, *, seed: int = 0, tenant: str = "acme", adapter: str = "pirate", **session: Any) -> Bundle:
        """Announces a good bundle and returns it; `session` replaces fields of the upload session."""
        settings, content = encode(config()), weights(tensors(seed=seed))
        verdict = verify_bundle(settings, content, base=self.base, tenant=tenant, training={"seed": str(seed)})
        document = build_manifest(
            verdict,
            adapter=adapter,
            version=1,
            created_time="2026-01-31T12:00:00Z",
            source={"kind": "upload", "uri": "test"},
        )
        manifest = sign_envelope(IN_TOTO_PAYLOAD_TYPE, document, self.publisher)
        granted = UploadSession(
            upload_id=f"upload-{seed}",
            tenant=tenant,
            revision_id=str(verdict.revision_id),
            base_model="small",
            weights_digest=sha256_digest(content),
            weights_size=len(content),
            config_digest=sha256_digest(settings),
            expires=int(time.time()) + 600,
        )
        self.revisions[granted.revision_id] = adapters.Revision(
            name=f"tenants/{tenant}/adapters/{adapter}/revisions/v1",
            revision_id=granted.revision_id,
            version=1,
            state=State.STATE_PENDING,
            weights_digest=granted.weights_digest,
            size_bytes=granted.weights_size,
            manifest_envelope=manifest,
        )
        return Bundle(settings, content, granted.revision_id, manifest, replace(granted, **session))

    async def move(self, revision_id: str, state: Any, *, record_key: SigningKey | None = None) -> None:
        """Sets a revision's state and tells the followers."""
        revision = self.revisions[revision_id]
        revision.state = state
        _, tenant, _, adapter, *_ = revision.name.split("/")
        if state == State.STATE_ACTIVE:
            record = Record(
                revision_id=revision_id,
                tenant=tenant,
                adapter=adapter,
                version=1,
                base_id=base_id(self.base),
                weights_digest=revision.weights_digest,
                weights_size=revision.size_bytes,
                state="ACTIVE",
                sequence=self.epoch,
                issued_time=int(time.time()),
            )
            envelope = self.records[revision_id] = seal(record, record_key or self.key)
            self.leaves[revision_id] = self.log.record(revision.name, envelope)
        async with self._changed:
            self.epoch += 1
            self._changed.notify_all()

    def _items(self) -> list[catalog.CatalogItem]:
        items = self.log.told()[: self.withheld]
        items += [
            catalog.CatalogItem(base_model=catalog.CatalogBaseModel(base_model="small", base_id=base_id(self.base)))
        ]
        for revision in self.revisions.values():
            _, tenant, _, adapter, *_ = revision.name.split("/")
            items.append(
                catalog.CatalogItem(
                    revision=catalog.CatalogRevision(
                        revision_id=revision.revision_id,
                        tenant=tenant,
                        adapter=adapter,
                        version=1,
                        state=revision.state,
                        base_model="small",
                        weights_digest=revision.weights_digest,
                        size_bytes=revision.size_bytes,
                        record_envelope=self.records.get(revision.revision_id, b""),
                        record_leaf=self.leaves.get(revision.revision_id, 0),
                    )
                )
            )
        return items

    async def GetRevision(self, request: Any, context: Any) -> Any:
        if request.name not in self.revisions:
            raise LoraportError("REVISION_NOT_FOUND")
        return self.revisions[request.name]

    async def AdmitRevision(self, request: Any, context: Any) -> Any:
        self.admit_hook()
        statement = open_statement(Verification, request.verification_envelope, self._loader_keys)
        self.admitted.append(statement)
        revision = self.revisions[statement.revision_id]
        revision.state = State.STATE_VERIFIED if statement.admitted else State.STATE_QUARANTINED
        for code, detail, subject in statement.violations:
            revision.reasons.add(code=code, detail=detail, subject=subject)
        return revision

    async def GetBaseModel(self, request: Any, context: Any) -> Any:
        return bases.BaseModel(name=request.name, base_id=base_id(self.base), spec_json=canonical(to_json(self.base)))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            seen = self.epoch
            checkpoint = self.checkpoint()
            yield catalog.WatchResponse(epoch=seen, items=self._items(), synced=True, checkpoint=checkpoint)
            async with self._changed:
                await self._changed.wait_for(lambda: self.epoch > seen)  # noqa: B023 - waited for at once

    async def GetEpoch(self, request: Any, context: Any) -> Any:
        return catalog.GetEpochResponse(epoch=self.epoch)


@dataclass
class Rig:
    """A running loader. `executor(name)` is a stub under an executor's identity, `uploads` and `threaded` are without any."""

    service: LoaderService
    registry: FakeRegistry
    registry_server: Server
    folder: Path
    store_address: str
    uploads: LoaderServiceStub
    threaded: LoaderServiceStub
    executor: Callable[..., LoaderServiceStub]
    loader_key: SigningKey

    async def upload(self, bundle: Bundle, *, settings: bytes | None = None, content: bytes | None = None) -> Any:
        parts = upload_parts(
            seal(bundle.session, self.registry.key),
            bundle.config if settings is None else settings,
            bundle.weights if content is None else content,
        )
        return await self.send(parts)

    async def send(self, parts: Iterable[Any]) -> Any:
        """Uploads these messages, whatever they are.

        From a thread of the library's: its asyncio client forgets a refusal that came while it was still sending.
        """
        call: Any = self.threaded.Upload.future(iter(parts), timeout=60)  # type: ignore[attr-defined]
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        call.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        await ended.wait()
        return call.result()

    async def activate(self, bundle: Bundle) -> None:
        await self.registry.move(bundle.revision_id, State.STATE_ACTIVE)

    async def admit(self, **options: Any) -> Bundle:
        """Registers, uploads and activates a good bundle."""
        bundle = self.registry.register(**options)
        assert (await self.upload(bundle)).admitted
        await self.activate(bundle)
        return bundle

    async def ensure(self, bundle: Bundle, *, by: str = "executor-0") -> tuple[list[int], Any]:
        """Returns (stages, lease)."""
        call = self.executor(by).EnsureHost(pb.EnsureHostRequest(revision_id=bundle.revision_id), timeout=60)
        events = [event async for event in call]
        assert [event.WhichOneof("event") for event in events[:-1]] == ["stage"] * (len(events) - 1)
        return [event.stage.stage for event in events[:-1]], events[-1].lease

    async def read(self, lease: Any, *, by: str = "executor-0") -> bytes:
        call = self.executor(by).ReadBlob(pb.ReadBlobRequest(lease_id=lease.lease_id), timeout=60)
        return b"".join([piece.data async for piece in call])

    async def inventory(self) -> Any:
        return await self.executor("executor-0").Inventory(pb.InventoryRequest(), timeout=60)

    def stored_path(self, bundle: Bundle) -> Path:
        return self.folder / "verified" / verified_key(bundle.digest)


def upload_parts(session: bytes, settings: bytes, content: bytes, *, chunk: int = 1000) -> list[Any]:
    """The messages of an upload."""
    parts = [pb.UploadRequest(session=session)]
    for file, data in ((pb.FileChunk.FILE_CONFIG, settings), (pb.FileChunk.FILE_WEIGHTS, content)):
        for start in range(0, len(data), chunk):
            parts.append(pb.UploadRequest(chunk=pb.FileChunk(file=file, data=data[start : start + chunk])))
    return parts


@asynccontextmanager
async def running(
    tmp_path: Path, store_address: str, folder: Path, *, transport: Transport | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """Starts registry and loader, and ends both. `settings` are fields of the loader's configuration."""
    ca, admin_ca = make_ca("services"), make_ca("admins")
    registry_key, loader_key, router_key = (SigningKey.generate() for _ in range(3))
    _write_trust(tmp_path, {"registry": registry_key, "loader": loader_key, "router": router_key})
    (tmp_path / "ca.pem").write_bytes(ca[0])
    (tmp_path / "admin-ca.pem").write_bytes(admin_ca[0])
    for name in ("registry", "loader"):
        leaf = make_leaf(ca, uri=f"spiffe://loraport.local/service/{name}")
        (tmp_path / f"{name}.pem").write_bytes(leaf[0])
        (tmp_path / f"{name}.key").write_bytes(leaf[1])
    (tmp_path / "s3").write_text(f"{ACCESS}\n{SECRET}")

    registry = FakeRegistry(registry_key, loader_key, small_base())
    registry_server = Server(CertificateAuthorities.from_files(tmp_path / "ca.pem", tmp_path / "admin-ca.pem"))
    registry_server.add(add_AdapterServiceServicer_to_server, registry)
    registry_server.add(add_BaseModelServiceServicer_to_server, registry)
    registry_server.add(add_CatalogServiceServicer_to_server, registry)
    registry_server.add(add_LogServiceServicer_to_server, registry.log)
    files = TlsFiles(*(str(tmp_path / name) for name in ("registry.pem", "registry.key", "ca.pem", "admin-ca.pem")))
    key, certificate = files.read()
    registry_port = registry_server.listen("127.0.0.1:0", key=key, certificate=certificate, clients=True)
    await registry_server.start()

    service = await build(loader_config(tmp_path, registry_port, store_address, **settings), transport=transport)
    await service.start()
    channels: dict[str, grpc.aio.Channel] = {}

    def executor(name: str, *, role: str = "executor") -> LoaderServiceStub:
        if name not in channels:
            leaf = make_leaf(ca, uri=f"spiffe://loraport.local/service/{role}/{name}")
            credentials = grpc.ssl_channel_credentials(ca[0], leaf[1], leaf[0])
            channels[name] = grpc.aio.secure_channel(
                f"127.0.0.1:{service.port}", credentials, options=(("grpc.use_local_subchannel_pool", 1),)
            )
        return LoaderServiceStub(channels[name])

    address, public = f"127.0.0.1:{service.upload_port}", grpc.ssl_channel_credentials(ca[0])
    channels[""] = grpc.aio.secure_channel(address, public)
    link = grpc.secure_channel(address, public)
    uploads, threaded = LoaderServiceStub(channels[""]), LoaderServiceStub(link)
    try:
        yield Rig(service, registry, registry_server, folder, store_address, uploads, threaded, executor, loader_key)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels.values()))
        link.close()
        await service.stop()
        await registry_server.stop(0)


def loader_config(tmp_path: Path, registry_port: int, store_address: str, **settings: Any) -> LoaderConfig:
    """A configuration as the local stack writes it, read the way the service reads it."""
    value = {
        "listen": "127.0.0.1:0",
        "upload_listen": "127.0.0.1:0",
        "tls": {
            "certificate": str(tmp_path / "loader.pem"),
            "key": str(tmp_path / "loader.key"),
            "service_ca": str(tmp_path / "ca.pem"),
            "admin_ca": str(tmp_path / "admin-ca.pem"),
        },
        "trust_dir": str(tmp_path / "trust"),
        "signing_key": str(tmp_path / "trust" / "loader.key"),
        "registry_address": f"127.0.0.1:{registry_port}",
        "s3_endpoint": store_address,
        "s3_credentials": str(tmp_path / "s3"),
        "s3_quarantine_bucket": "quarantine",
        "s3_verified_bucket": "verified",
        "drain_s": 2.0,
        **settings,
    }
    return from_mapping(LoaderConfig, json.loads(json.dumps(value)), where="test")


def _write_trust(tmp_path: Path, keys: dict[str, SigningKey]) -> None:
    write_root(tmp_path / "trust", keys)
    for role, key in keys.items():
        path = tmp_path / "trust" / f"{role}.key"
        path.unlink(missing_ok=True)
        key.save(path)


async def reason(call: Any) -> str:
    """Awaits a call, or reads a stream to its end, and returns the reason of its failure."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return from_rpc_error(error, unavailable="INTERNAL").reason
    except LoraportError as error:
        return error.reason
    return ""


async def until(condition: Callable[[], Any], *, timeout_s: float = 60.0) -> None:
    """Waits until something holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
