"""A registry that tests start for themselves, and what its callers hold: certificates, keys, manifests."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from loraport.bundle.base import BaseModule, BaseSpec, base_id, to_json
from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, SigningKey, sign_envelope
from loraport.bundle.identity import WeightsFacts, build_identity, revision_id_of, tensor_names
from loraport.bundle.manifest import build_manifest, parse_manifest
from loraport.bundle.verdict import ModuleEntry, Verdict
from loraport.dev.pki import make_ca, make_leaf
from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import adapter_service_pb2_grpc as adapter_stubs
from loraport.registry.v1 import audit_service_pb2_grpc as audit_stubs
from loraport.registry.v1 import base_model_service_pb2 as base_pb
from loraport.registry.v1 import base_model_service_pb2_grpc as base_stubs
from loraport.registry.v1 import catalog_service_pb2_grpc as catalog_stubs
from loraport.registry.v1 import key_service_pb2 as key_pb
from loraport.registry.v1 import key_service_pb2_grpc as key_stubs
from loraport.registry.v1 import log_service_pb2_grpc as log_stubs
from loraport.registry.v1 import rollout_service_pb2_grpc as rollout_stubs
from loraport.registry.v1 import tenant_service_pb2 as tenant_pb
from loraport.registry.v1 import tenant_service_pb2_grpc as tenant_stubs
from services.registry.config import RegistryConfig
from services.registry.service import RegistryService
from services.shared.rpc.channels import TlsFiles
from services.shared.rpc.status import DETAILS_KEY
from services.shared.statements import Verification, seal
from tests.support.roots import write_root

SERVICE_CA, ADMIN_CA = make_ca("service"), make_ca("admin")
IDENTITIES = {
    "admin": (ADMIN_CA, "spiffe://loraport.local/admin/ops"),
    "router": (SERVICE_CA, "spiffe://loraport.local/service/router"),
    "loader": (SERVICE_CA, "spiffe://loraport.local/service/loader"),
    "executor": (SERVICE_CA, "spiffe://loraport.local/service/executor/e0"),
    "registry": (SERVICE_CA, "spiffe://loraport.local/service/registry"),
}
LEAVES = {name: make_leaf(ca, uri=uri) for name, (ca, uri) in IDENTITIES.items()}
REGISTRY_KEY, LOADER_KEY, ROUTER_KEY = SigningKey.generate(), SigningKey.generate(), SigningKey.generate()
PEPPER = b"0123456789abcdef0123456789abcdef"
TIMEOUT = 120


def digest_of(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def base_spec(name: str = "base") -> BaseSpec:
    modules = tuple(
        BaseModule(f"model.layers.{layer}.self_attn.{kind}_proj", "linear", 64, 64)
        for layer in range(2)
        for kind in ("q", "v")
    )
    return BaseSpec(
        weights_digest=digest_of(f"{name} weights"),
        config_digest=digest_of(f"{name} config"),
        tokenizer_digest=digest_of(f"{name} tokenizer"),
        dtype="F32",
        architecture="LlamaForCausalLM",
        tied_embeddings=True,
        vocab_size=100,
        max_positions=128,
        modules=modules,
    )


def module(path: str, *, rank: int = 4, width: int = 64) -> ModuleEntry:
    a_name, b_name = tensor_names(path)
    return ModuleEntry(
        path=path,
        rank=rank,
        alpha="8",
        scaling=2.0,
        in_features=width,
        out_features=width,
        a_name=a_name,
        b_name=b_name,
    )


def manifest(
    tenant: str,
    adapter: str,
    version: int,
    *,
    content: str = "c",
    base: BaseSpec | None = None,
    modules: tuple[ModuleEntry, ...] | None = None,
    size: int = 4096,
    notes: str = "",
) -> bytes:
    """A manifest of made-up weights; `content` decides their digest, hence the revision id."""
    base = base or base_spec()
    modules = modules or (module("model.layers.0.self_attn.q_proj"), module("model.layers.1.self_attn.v_proj", rank=8))
    facts = WeightsFacts(digest=digest_of(content), size=size, dtype="F32")
    identity = build_identity(facts, modules, tenant=tenant, base=base, training={})
    verdict = Verdict(
        admitted=True,
        violations=(),
        warnings=(),
        identity=identity,
        revision_id=revision_id_of(identity),
        modules=modules,
        dtype="F32",
        weights_digest=digest_of(content),
        weights_size=size,
        config_digest=digest_of("config"),
        config_size=100,
    )
    return build_manifest(
        verdict,
        adapter=adapter,
        version=version,
        created_time="2026-01-31T12:00:00Z",
        source={"kind": "upload", "uri": "file:bundle"},
        notes=notes,
    )


def verification(payload: bytes, *, admitted: bool = True, key: SigningKey = LOADER_KEY, **changes: Any) -> bytes:
    """The loader's word on a manifest's revision."""
    parsed = parse_manifest(payload)
    values: dict[str, Any] = {
        "revision_id": parsed.revision_id,
        "tenant": parsed.tenant,
        "base_id": base_id(base_spec()),
        "weights_digest": parsed.weights_digest,
        "weights_size": parsed.weights_size,
        "admitted": admitted,
        "violations": () if admitted else (("DIGEST_MISMATCH", "other bytes came", "adapter_model.safetensors"),),
        "warnings": (("NO_EFFECT", "B is zero", ""),) if admitted else (),
        "verifier": "loader/test",
        "verified_time": int(time.time()),
    }
    return seal(Verification(**(values | changes)), key)


@dataclass
class Rig:
    """A serving registry and stubs per identity. `signers` are the tenants' private keys."""

    service: RegistryService
    address: str
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    signers: dict[str, SigningKey] = field(default_factory=dict)

    def connect(self, identity: str) -> grpc.aio.Channel:
        """Returns a channel of its own, for somebody who closes it."""
        certificate, key = LEAVES[identity]
        credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 8 << 20)]
        return grpc.aio.secure_channel(self.address, credentials, options=options)

    def channel(self, identity: str) -> grpc.aio.Channel:
        """Returns the channel of an identity, which ends with the registry."""
        if identity not in self.channels:
            self.channels[identity] = self.connect(identity)
        return self.channels[identity]

    def tenants(self, identity: str = "admin") -> tenant_stubs.TenantServiceStub:
        return tenant_stubs.TenantServiceStub(self.channel(identity))

    def keys(self, identity: str = "admin") -> key_stubs.KeyServiceStub:
        return key_stubs.KeyServiceStub(self.channel(identity))

    def bases(self, identity: str = "admin") -> base_stubs.BaseModelServiceStub:
        return base_stubs.BaseModelServiceStub(self.channel(identity))

    def adapters(self, identity: str = "admin") -> adapter_stubs.AdapterServiceStub:
        return adapter_stubs.AdapterServiceStub(self.channel(identity))

    def catalog(self, identity: str = "router") -> catalog_stubs.CatalogServiceStub:
        return catalog_stubs.CatalogServiceStub(self.channel(identity))

    def log(self, identity: str = "executor") -> log_stubs.LogServiceStub:
        return log_stubs.LogServiceStub(self.channel(identity))

    def audit(self, identity: str = "admin") -> audit_stubs.AuditServiceStub:
        return audit_stubs.AuditServiceStub(self.channel(identity))

    def rollouts(self, identity: str = "admin") -> rollout_stubs.RolloutServiceStub:
        return rollout_stubs.RolloutServiceStub(self.channel(identity))

    async def tenant(self, name: str, **settings: Any) -> tenant_pb.Tenant:
        """Creates a tenant with one signer."""
        request = tenant_pb.CreateTenantRequest(tenant_id=name, tenant=tenant_pb.Tenant(**settings))
        made = await self.tenants().CreateTenant(request, timeout=TIMEOUT)
        self.signers[name] = SigningKey.generate()
        signer = key_pb.Signer(public_key_pem=self.signers[name].public_pem.decode())
        await self.keys().CreateSigner(
            key_pb.CreateSignerRequest(parent=f"tenants/{name}", signer_id="ci", signer=signer), timeout=TIMEOUT
        )
        return made

    async def base(self, name: str = "base") -> base_pb.BaseModel:
        spec = canonical(to_json(base_spec(name)))
        request = base_pb.CreateBaseModelRequest(base_model_id=name, base_model=base_pb.BaseModel(spec_json=spec))
        return await self.bases().CreateBaseModel(request, timeout=TIMEOUT)

    def sign(self, tenant: str, payload: bytes) -> bytes:
        return sign_envelope(IN_TOTO_PAYLOAD_TYPE, payload, self.signers[tenant])

    async def register(self, tenant: str, payload: bytes, **options: Any) -> adapter_pb.RegisterRevisionResponse:
        request = adapter_pb.RegisterRevisionRequest(
            parent=f"tenants/{tenant}", manifest_envelope=self.sign(tenant, payload), **options
        )
        return await self.adapters().RegisterRevision(request, timeout=TIMEOUT)

    async def admit(self, payload: bytes, **options: Any) -> adapter_pb.Revision:
        request = adapter_pb.AdmitRevisionRequest(verification_envelope=verification(payload, **options))
        return await self.adapters("loader").AdmitRevision(request, timeout=TIMEOUT)

    async def approve(self, name: str, **options: Any) -> adapter_pb.Revision:
        request = adapter_pb.ApproveRevisionRequest(name=name, **options)
        return await self.adapters().ApproveRevision(request, timeout=TIMEOUT)

    async def revoke(self, name: str, reason: str = "because", **options: Any) -> adapter_pb.Revision:
        request = adapter_pb.RevokeRevisionRequest(name=name, reason=reason, **options)
        return await self.adapters().RevokeRevision(request, timeout=TIMEOUT)

    async def alias(self, name: str, revision_id: str, **options: Any) -> adapter_pb.Alias:
        request = adapter_pb.SetAliasRequest(name=name, revision_id=revision_id, **options)
        return await self.adapters().SetAlias(request, timeout=TIMEOUT)

    async def active(self, tenant: str, adapter: str, version: int, content: str) -> adapter_pb.Revision:
        """Publishes a revision all the way to ACTIVE."""
        payload = manifest(tenant, adapter, version, content=content)
        registered = await self.register(tenant, payload)
        await self.admit(payload)
        return await self.approve(registered.revision.name)


def write_config(folder: Path, *, database_url: str | None = None, **changes: Any) -> RegistryConfig:
    """Writes keys and certificates below `folder` and returns a configuration that names them."""
    trust = folder / "trust"
    if not trust.exists():
        write_root(trust, {"registry": REGISTRY_KEY, "loader": LOADER_KEY, "router": ROUTER_KEY})
    files: Mapping[str, bytes] = {
        "registry.pem": LEAVES["registry"][0],
        "registry.key": LEAVES["registry"][1],
        "ca.pem": SERVICE_CA[0],
        "admin-ca.pem": ADMIN_CA[0],
        "pepper": PEPPER,
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if not (folder / "signing.key").exists():
        REGISTRY_KEY.save(folder / "signing.key")
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "database_url": database_url or f"sqlite:///{folder}/registry.db",
        "tls": TlsFiles(
            certificate=str(folder / "registry.pem"),
            key=str(folder / "registry.key"),
            service_ca=str(folder / "ca.pem"),
            admin_ca=str(folder / "admin-ca.pem"),
        ),
        "trust_dir": str(trust),
        "signing_key_file": str(folder / "signing.key"),
        "pepper_file": str(folder / "pepper"),
        "poll_interval_s": 0.1,
        "drain_s": 1.0,
    }
    return RegistryConfig(**(values | changes))


@asynccontextmanager
async def serving(config: RegistryConfig) -> AsyncIterator[Rig]:
    """Serves until the block ends."""
    service = RegistryService(config)
    await service.start()
    rig = Rig(service, f"127.0.0.1:{service.port}")
    try:
        yield rig
    finally:
        await asyncio.gather(*(channel.close() for channel in rig.channels.values()))
        await service.stop()


def status_of(error: grpc.RpcError) -> status_pb2.Status:
    return status_pb2.Status.FromString(dict(error.trailing_metadata())[DETAILS_KEY])


def info_of(error: grpc.RpcError) -> error_details_pb2.ErrorInfo:
    """The one ErrorInfo of a failed call."""
    infos = []
    for detail in status_of(error).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            infos.append(info)
    assert len(infos) == 1
    return infos[0]


async def reason_of(call: Any) -> str:
    """Awaits a call that must fail, and returns its reason."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return info_of(error).reason
    raise AssertionError("the call was not refused")
