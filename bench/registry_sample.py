"""A registry process for `bench/registry.py`, its callers, and the one sample that everything else is copied from."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraport.bundle.base import BaseModule, BaseSpec, base_id, to_json
from loraport.bundle.canonical import canonical
from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, SigningKey, sign_envelope
from loraport.bundle.identity import WeightsFacts, build_identity, revision_id_of, tensor_names
from loraport.bundle.manifest import build_manifest, parse_manifest
from loraport.bundle.verdict import ModuleEntry, Verdict
from loraport.dev.pki import make_ca, make_leaf
from loraport.registry.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    base_model_service_pb2,
    base_model_service_pb2_grpc,
    key_service_pb2,
    key_service_pb2_grpc,
    tenant_service_pb2,
    tenant_service_pb2_grpc,
)
from loraport.trust.edit import first_root
from loraport.trust.files import write_root
from loraport.trust.root import PAYLOAD_TYPE, Role
from services.shared.rpc.channels import CHANNEL_OPTIONS, TlsFiles
from services.shared.statements import Verification, seal

TIMEOUT_S = 30.0
TENANT, ADAPTER, VERSION, SIGNER, ALIAS, BASE = "sample-tenant", "sample-adapter", 1, "ci", "prod", "base"
LAYERS, WIDTH, RANK = 1, 64, 8


class Fleet:
    """Keys, certificates and the configuration of one registry below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "registry.db"
        self.keys = {role: SigningKey.generate() for role in ("registry", "loader", "router")}
        self.signer = SigningKey.generate()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._service_ca, admin_ca = make_ca("service"), make_ca("admin")
        identities = {
            "registry": (self._service_ca, "service/registry"),
            "loader": (self._service_ca, "service/loader"),
            "router": (self._service_ca, "service/router"),
            "admin": (admin_ca, "admin/bench"),
        }
        self._leaves = {
            name: make_leaf(ca, uri=f"spiffe://loraport.local/{uri}") for name, (ca, uri) in identities.items()
        }
        trust = folder / "trust"
        trust.mkdir()
        by_role = {role: [self.keys.get(role, self.keys["registry"]).public_pem] for role in Role}
        root = first_root(by_role, now=int(time.time()))
        write_root(trust, root, sign_envelope(PAYLOAD_TYPE, root.body(), self.keys["registry"]))
        self.keys["registry"].save(folder / "signing.key")
        files = {"ca.pem": self._service_ca[0], "admin-ca.pem": admin_ca[0], "pepper": b"p" * 32}
        for name, (certificate, key) in self._leaves.items():
            files |= {f"{name}.pem": certificate, f"{name}.key": key}
        for name, data in files.items():
            (folder / name).write_bytes(data)
        config = {
            "listen": self.address,
            "database_url": f"sqlite:///{self.database}",
            "tls": {
                "certificate": str(folder / "registry.pem"),
                "key": str(folder / "registry.key"),
                "service_ca": str(folder / "ca.pem"),
                "admin_ca": str(folder / "admin-ca.pem"),
            },
            "trust_dir": str(trust),
            "signing_key_file": str(folder / "signing.key"),
            "pepper_file": str(folder / "pepper"),
        }
        (folder / "registry.json").write_text(json.dumps(config))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Runs the registry until the block ends. Raises RuntimeError when it does not come up."""
        command = [sys.executable, "-m", "services.registry", "--config", str(self.folder / "registry.json")]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._wait(process)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        with self.channel("admin") as channel:
            deadline = time.monotonic() + TIMEOUT_S
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
                    return
                except grpc.RpcError:
                    time.sleep(0.05)
        raise RuntimeError("the registry did not start: " + (self.folder / "log").read_text()[-2000:])

    def credentials(self, identity: str) -> grpc.ChannelCredentials:
        certificate, key = self._leaves[identity]
        return grpc.ssl_channel_credentials(self._service_ca[0], key, certificate)

    def channel(self, identity: str) -> grpc.Channel:
        """Returns a channel under an identity."""
        return grpc.secure_channel(self.address, self.credentials(identity), options=CHANNEL_OPTIONS)

    def async_channel(self, identity: str) -> grpc.aio.Channel:
        """As `channel`, for the running event loop."""
        return grpc.aio.secure_channel(self.address, self.credentials(identity), options=CHANNEL_OPTIONS)

    def tls(self, identity: str) -> TlsFiles:
        """Returns the files of an identity."""
        names = {
            "certificate": f"{identity}.pem",
            "key": f"{identity}.key",
            "service_ca": "ca.pem",
            "admin_ca": "admin-ca.pem",
        }
        return TlsFiles(**{field: str(self.folder / name) for field, name in names.items()})


def base_spec() -> BaseSpec:
    """A small base model: two linear modules a layer."""
    return BaseSpec(
        weights_digest=sha256_digest(b"base weights"),
        config_digest=sha256_digest(b"base config"),
        tokenizer_digest=sha256_digest(b"base tokenizer"),
        dtype="BF16",
        architecture="LlamaForCausalLM",
        tied_embeddings=True,
        vocab_size=1000,
        max_positions=1024,
        modules=tuple(
            BaseModule(f"model.layers.{layer}.self_attn.{kind}_proj", "linear", WIDTH, WIDTH)
            for layer in range(LAYERS)
            for kind in ("q", "v")
        ),
    )


def manifest_of(tenant: str, adapter: str, version: int, content: bytes) -> bytes:
    """Returns the manifest of made-up weights; `content` decides their digest."""
    base = base_spec()
    modules = []
    for target in base.modules:
        a_name, b_name = tensor_names(target.path)
        modules.append(
            ModuleEntry(
                path=target.path,
                rank=RANK,
                alpha="16",
                scaling=2.0,
                in_features=WIDTH,
                out_features=WIDTH,
                a_name=a_name,
                b_name=b_name,
            )
        )
    weights = WeightsFacts(digest=sha256_digest(content), size=1 << 20, dtype="BF16")
    identity = build_identity(weights, modules, tenant=tenant, base=base, training={})
    verdict = Verdict(
        admitted=True, violations=(), warnings=(), identity=identity, revision_id=revision_id_of(identity),
        modules=tuple(modules), dtype="BF16", weights_digest=weights.digest, weights_size=weights.size,
        config_digest=sha256_digest(b"config"), config_size=500,
    )  # fmt: skip
    source = {"kind": "upload", "uri": "file:bundle"}
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return build_manifest(verdict, adapter=adapter, version=version, created_time=created, source=source)


def publish_sample(fleet: Fleet) -> str:
    """Publishes the sample through the running service, with every call that publishing takes; returns its id."""
    with fleet.channel("admin") as admin, fleet.channel("loader") as loader:
        call: Any = tenant_service_pb2_grpc.TenantServiceStub(admin).CreateTenant
        call(tenant_service_pb2.CreateTenantRequest(tenant_id=TENANT), timeout=TIMEOUT_S)
        keys: Any = key_service_pb2_grpc.KeyServiceStub(admin)
        keys.CreateApiKey(key_service_pb2.CreateApiKeyRequest(parent=f"tenants/{TENANT}"), timeout=TIMEOUT_S)
        signer = key_service_pb2.Signer(public_key_pem=fleet.signer.public_pem.decode())
        keys.CreateSigner(
            key_service_pb2.CreateSignerRequest(parent=f"tenants/{TENANT}", signer_id=SIGNER, signer=signer),
            timeout=TIMEOUT_S,
        )
        spec = base_model_service_pb2.BaseModel(spec_json=canonical(to_json(base_spec())))
        call = base_model_service_pb2_grpc.BaseModelServiceStub(admin).CreateBaseModel
        call(base_model_service_pb2.CreateBaseModelRequest(base_model_id=BASE, base_model=spec), timeout=TIMEOUT_S)
        return _publish_revision(fleet, adapter_service_pb2_grpc.AdapterServiceStub(admin), loader)


def _publish_revision(fleet: Fleet, adapters: Any, loader: grpc.Channel) -> str:
    payload = manifest_of(TENANT, ADAPTER, VERSION, b"sample")
    envelope = sign_envelope(IN_TOTO_PAYLOAD_TYPE, payload, fleet.signer)
    request = adapter_service_pb2.RegisterRevisionRequest(parent=f"tenants/{TENANT}", manifest_envelope=envelope)
    registered = adapters.RegisterRevision(request, timeout=TIMEOUT_S).revision
    parsed = parse_manifest(payload)
    verification = Verification(
        revision_id=parsed.revision_id,
        tenant=TENANT,
        base_id=base_id(base_spec()),
        weights_digest=parsed.weights_digest,
        weights_size=parsed.weights_size,
        admitted=True,
        violations=(),
        warnings=(),
        verifier="loader/bench",
        verified_time=int(time.time()) + 1,
    )
    admit: Any = adapter_service_pb2_grpc.AdapterServiceStub(loader).AdmitRevision
    statement = seal(verification, fleet.keys["loader"])
    admit(adapter_service_pb2.AdmitRevisionRequest(verification_envelope=statement), timeout=TIMEOUT_S)
    approve = adapter_service_pb2.ApproveRevisionRequest(name=registered.name)
    adapters.ApproveRevision(approve, timeout=TIMEOUT_S)
    alias = f"tenants/{TENANT}/adapters/{ADAPTER}/aliases/{ALIAS}"
    move = adapter_service_pb2.SetAliasRequest(name=alias, revision_id=registered.revision_id)
    adapters.SetAlias(move, timeout=TIMEOUT_S)
    return str(registered.revision_id)
