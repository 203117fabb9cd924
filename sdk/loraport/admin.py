"""The admin plane as Python calls: what operators and publishers do, under a client certificate.

    with AdminClient.local(".loraport") as admin:
        admin.create_tenant("acme")

Methods return the protobuf messages of the services' contracts. Every failure is a `loraport.errors.LoraportError`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc

from loraport.accounts import Accounts
from loraport.bundle import base as base_models
from loraport.bundle.canonical import canonical, load_strict
from loraport.dev.layout import default_data, read_endpoints
from loraport.errors import error_from_rpc
from loraport.loader.v1 import loader_service_pb2 as loader_pb
from loraport.loader.v1 import loader_service_pb2_grpc as loader_stubs
from loraport.registry.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    audit_service_pb2,
    audit_service_pb2_grpc,
    base_model_service_pb2,
    base_model_service_pb2_grpc,
    key_service_pb2,
    key_service_pb2_grpc,
    log_service_pb2,
    log_service_pb2_grpc,
    tenant_service_pb2,
    tenant_service_pb2_grpc,
    trust_service_pb2,
    trust_service_pb2_grpc,
)
from loraport.rollouts import Rollouts
from loraport.router.v1 import router_admin_service_pb2, router_admin_service_pb2_grpc
from loraport.types.v1 import types_pb2

TIMEOUT_S = 30.0
# How long an alias that is moved at once waits for the executors.
QUORUM_S = 60.0
# The loader gives up on a client or a source that is slower than 256 KiB/s long before.
TRANSFER_TIMEOUT_S = 7200.0
PAGE_SIZE = 500
MAX_SPEC_BYTES = 16 << 20
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 32 << 20),
)

T = TypeVar("T")


class _Peer:
    """One service's address: its channel, and errors that name it."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials) -> None:
        self.channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        self._address = address

    def call(self, method: Callable[..., T], request: Any, *, timeout_s: float = TIMEOUT_S) -> T:
        """Calls a method. Raises LoraportError."""
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, endpoint=self._address) from None

    def stream(self, method: Callable[..., Iterable[T]], request: Any, *, timeout_s: float) -> Iterator[T]:
        """Yields what a method streams. Raises LoraportError."""
        try:
            yield from method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, endpoint=self._address) from None

    def pages(self, method: Callable[..., Any], request: Any, items: str) -> Iterator[Any]:
        """Yields the items of all pages. Raises LoraportError."""
        request.page_size = PAGE_SIZE
        while True:
            response = self.call(method, request)
            yield from getattr(response, items)
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token


class AdminClient:
    """Calls registry, router admin plane and loader uploads. Close it, or use it in a `with` statement."""

    def __init__(
        self, *, registry: str, router_admin: str, loader_upload: str, ca: bytes, certificate: bytes, key: bytes
    ) -> None:
        """Addresses are `host:port`; `ca`, `certificate` and `key` are PEM."""
        admin = grpc.ssl_channel_credentials(ca, key, certificate)
        self._registry = _Peer(registry, admin)
        self._router = _Peer(router_admin, admin)
        # An upload proves itself by its session, so the loader's door for it never sees the admin's certificate.
        self._loader = _Peer(loader_upload, grpc.ssl_channel_credentials(ca))
        self.accounts = Accounts(self._registry, self._router)
        self.rollouts = Rollouts(self._registry)
        self._tenants: Any = tenant_service_pb2_grpc.TenantServiceStub(self._registry.channel)
        self._keys: Any = key_service_pb2_grpc.KeyServiceStub(self._registry.channel)
        self._bases: Any = base_model_service_pb2_grpc.BaseModelServiceStub(self._registry.channel)
        self._adapters: Any = adapter_service_pb2_grpc.AdapterServiceStub(self._registry.channel)
        self._audit: Any = audit_service_pb2_grpc.AuditServiceStub(self._registry.channel)
        self._log: Any = log_service_pb2_grpc.LogServiceStub(self._registry.channel)
        self._trust: Any = trust_service_pb2_grpc.TrustServiceStub(self._registry.channel)
        self._fleet: Any = router_admin_service_pb2_grpc.RouterAdminServiceStub(self._router.channel)
        self._uploads: Any = loader_stubs.LoaderServiceStub(self._loader.channel)

    @classmethod
    def local(cls, data: str | Path | None = None) -> "AdminClient":
        """Returns a client of the local stack at `data`.

        Raises:
            StackError: there is no such stack.
            OSError: its credentials cannot be read.
        """
        data = default_data() if data is None else data
        endpoints = read_endpoints(data)
        credentials = endpoints["credentials"]
        return cls(
            registry=endpoints["registry"],
            router_admin=endpoints["router_admin"],
            loader_upload=endpoints["loader_upload"],
            ca=Path(credentials["ca"]).read_bytes(),
            certificate=Path(credentials["admin_certificate"]).read_bytes(),
            key=Path(credentials["admin_key"]).read_bytes(),
        )

    def close(self) -> None:
        """Closes the connections."""
        for peer in (self._registry, self._router, self._loader):
            peer.channel.close()

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Tenants

    def create_tenant(
        self, tenant: str, *, display_name: str = "", weight: float | None = None, base_allowed: bool | None = None
    ) -> tenant_service_pb2.Tenant:
        """Creates a tenant; unset settings take the service's defaults."""
        settings = tenant_service_pb2.Tenant(display_name=display_name, base_allowed=base_allowed)
        if weight is not None:
            settings.weight = weight
        request = tenant_service_pb2.CreateTenantRequest(tenant_id=tenant, tenant=settings)
        return self._registry.call(self._tenants.CreateTenant, request)

    def list_tenants(self) -> list[tenant_service_pb2.Tenant]:
        """Returns all tenants, ordered by name."""
        return list(self._registry.pages(self._tenants.ListTenants, tenant_service_pb2.ListTenantsRequest(), "tenants"))

    # API keys and signers

    def create_api_key(
        self, tenant: str, *, scopes: Sequence[str] = (), expires: datetime | None = None
    ) -> tuple[key_service_pb2.ApiKey, str]:
        """Creates an API key and returns it with its secret, which is shown only now."""
        api_key = key_service_pb2.ApiKey(scopes=scopes)
        if expires is not None:
            api_key.expire_time.FromDatetime(expires)
        request = key_service_pb2.CreateApiKeyRequest(parent=f"tenants/{tenant}", api_key=api_key)
        response = self._registry.call(self._keys.CreateApiKey, request)
        return response.api_key, response.secret

    def list_api_keys(self, tenant: str) -> list[key_service_pb2.ApiKey]:
        """Returns a tenant's API keys, oldest first."""
        request = key_service_pb2.ListApiKeysRequest(parent=f"tenants/{tenant}")
        return list(self._registry.pages(self._keys.ListApiKeys, request, "api_keys"))

    def revoke_api_key(self, tenant: str, key: str) -> key_service_pb2.ApiKey:
        """Makes an API key useless for ever."""
        return self._registry.call(
            self._keys.RevokeApiKey, key_service_pb2.RevokeApiKeyRequest(name=f"tenants/{tenant}/keys/{key}")
        )

    def create_signer(self, tenant: str, signer: str, public_key_pem: bytes) -> key_service_pb2.Signer:
        """Trusts a public key to sign a tenant's manifests."""
        request = key_service_pb2.CreateSignerRequest(
            parent=f"tenants/{tenant}",
            signer_id=signer,
            signer=key_service_pb2.Signer(public_key_pem=public_key_pem.decode("ascii")),
        )
        return self._registry.call(self._keys.CreateSigner, request)

    def list_signers(self, tenant: str) -> list[key_service_pb2.Signer]:
        """Returns a tenant's signers, oldest first."""
        request = key_service_pb2.ListSignersRequest(parent=f"tenants/{tenant}")
        return list(self._registry.pages(self._keys.ListSigners, request, "signers"))

    def revoke_signer(self, tenant: str, signer: str, *, since_log_index: int | None = None) -> key_service_pb2.Signer:
        """Accepts no further manifest by a signer; with `since_log_index`, none that it announced from there on."""
        name = f"tenants/{tenant}/signers/{signer}"
        request = key_service_pb2.RevokeSignerRequest(name=name, since_log_index=since_log_index)
        return self._registry.call(self._keys.RevokeSigner, request)

    def get_delegation(self, tenant: str) -> key_service_pb2.Delegation:
        """Returns how many of a tenant's signers a manifest needs."""
        request = key_service_pb2.GetDelegationRequest(parent=f"tenants/{tenant}")
        return self._registry.call(self._keys.GetDelegation, request)

    def set_signer_threshold(self, tenant: str, threshold: int) -> key_service_pb2.Delegation:
        """Sets how many of a tenant's signers a manifest needs."""
        request = key_service_pb2.SetSignerThresholdRequest(parent=f"tenants/{tenant}", threshold=threshold)
        return self._registry.call(self._keys.SetSignerThreshold, request)

    # Trust roots: nothing of them is verified here, see `loraport.trust`

    def list_trust_roots(self) -> list[trust_service_pb2.TrustRoot]:
        """Returns the trust roots that the registry shows, oldest first."""
        request = trust_service_pb2.ListTrustRootsRequest()
        return list(self._registry.pages(self._trust.ListTrustRoots, request, "trust_roots"))

    def submit_trust_root(self, envelope: bytes) -> trust_service_pb2.TrustRoot:
        """Puts the next trust root in force."""
        request = trust_service_pb2.SubmitTrustRootRequest(envelope=envelope)
        return self._registry.call(self._trust.SubmitTrustRoot, request)

    # Base models

    def create_base_model(self, name: str, spec: base_models.BaseSpec) -> base_model_service_pb2.BaseModel:
        """Registers a base model."""
        request = base_model_service_pb2.CreateBaseModelRequest(
            base_model_id=name,
            base_model=base_model_service_pb2.BaseModel(spec_json=canonical(base_models.to_json(spec))),
        )
        return self._registry.call(self._bases.CreateBaseModel, request)

    def base_spec(self, name: str) -> base_models.BaseSpec:
        """Returns what admission knows of a registered base model."""
        request = base_model_service_pb2.GetBaseModelRequest(name=f"baseModels/{name}")
        data = self._registry.call(self._bases.GetBaseModel, request).spec_json
        return base_models.from_json(load_strict(data, max_bytes=MAX_SPEC_BYTES, max_depth=8))

    def list_base_models(self) -> list[base_model_service_pb2.BaseModel]:
        """Returns all base models without their specs, ordered by name."""
        return list(
            self._registry.pages(
                self._bases.ListBaseModels, base_model_service_pb2.ListBaseModelsRequest(), "base_models"
            )
        )

    # Adapters, revisions, aliases

    def list_adapters(self, tenant: str | None = None) -> list[adapter_service_pb2.Adapter]:
        """Returns a tenant's adapters, or everybody's, ordered by name."""
        request = adapter_service_pb2.ListAdaptersRequest(parent=f"tenants/{tenant or '-'}")
        return list(self._registry.pages(self._adapters.ListAdapters, request, "adapters"))

    def get_adapter(self, tenant: str, adapter: str) -> adapter_service_pb2.Adapter:
        """Returns one adapter with its aliases."""
        request = adapter_service_pb2.GetAdapterRequest(name=f"tenants/{tenant}/adapters/{adapter}")
        return self._registry.call(self._adapters.GetAdapter, request)

    def list_revisions(self, tenant: str, adapter: str) -> list[adapter_service_pb2.Revision]:
        """Returns an adapter's revisions, newest version first."""
        request = adapter_service_pb2.ListRevisionsRequest(parent=f"tenants/{tenant}/adapters/{adapter}")
        return list(self._registry.pages(self._adapters.ListRevisions, request, "revisions"))

    def get_revision(self, name: str) -> adapter_service_pb2.Revision:
        """Returns one revision by resource name or `sha256:<64 hex>`, with its envelopes."""
        return self._registry.call(self._adapters.GetRevision, adapter_service_pb2.GetRevisionRequest(name=name))

    def register_revision(self, tenant: str, envelope: bytes) -> adapter_service_pb2.RegisterRevisionResponse:
        """Announces a revision by its signed manifest; the answer holds the upload session."""
        request = adapter_service_pb2.RegisterRevisionRequest(parent=f"tenants/{tenant}", manifest_envelope=envelope)
        return self._registry.call(self._adapters.RegisterRevision, request)

    def upload(self, parts: Iterator[loader_pb.UploadRequest]) -> loader_pb.UploadResponse:
        """Sends a bundle in pieces, the session first, and returns what verification found."""
        return self._loader.call(self._uploads.Upload, parts, timeout_s=TRANSFER_TIMEOUT_S)

    def import_bundle(
        self, request: loader_pb.ImportRequest, *, observe: Callable[[types_pb2.StageReport], None] | None = None
    ) -> loader_pb.UploadResponse:
        """Has the loader fetch a bundle and returns what verification found; `observe` hears of every stage."""
        result = loader_pb.UploadResponse()
        for event in self._loader.stream(self._uploads.Import, request, timeout_s=TRANSFER_TIMEOUT_S):
            if event.WhichOneof("event") == "result":
                result = event.result
            elif observe is not None:
                observe(event.stage)
        return result

    def approve_revision(self, name: str) -> adapter_service_pb2.Revision:
        """Lets a verified revision serve."""
        return self._registry.call(
            self._adapters.ApproveRevision, adapter_service_pb2.ApproveRevisionRequest(name=name)
        )

    def revoke_revision(self, name: str, *, reason: str, security: bool = False) -> adapter_service_pb2.Revision:
        """Takes a revision out of service for ever; one that a rollout needs only as a matter of security."""
        request = adapter_service_pb2.RevokeRevisionRequest(name=name, reason=reason, security=security)
        return self._registry.call(self._adapters.RevokeRevision, request)

    def set_alias(
        self,
        tenant: str,
        adapter: str,
        alias: str,
        revision_id: str,
        *,
        now: bool = False,
        reason: str = "",
        force: bool = False,
    ) -> adapter_service_pb2.Alias:
        """Creates an alias, or moves one; one that serves needs `now`, a reason and a quorum, or else `force`."""
        name = f"tenants/{tenant}/adapters/{adapter}/aliases/{alias}"
        request = adapter_service_pb2.SetAliasRequest(name=name, revision_id=revision_id, now=now, reason=reason)
        request.force = force
        timeout_s = QUORUM_S if now and not force else TIMEOUT_S
        return self._registry.call(self._adapters.SetAlias, request, timeout_s=timeout_s)

    def delete_alias(self, tenant: str, adapter: str, alias: str) -> adapter_service_pb2.Alias:
        """Removes an alias."""
        request = adapter_service_pb2.DeleteAliasRequest(name=f"tenants/{tenant}/adapters/{adapter}/aliases/{alias}")
        return self._registry.call(self._adapters.DeleteAlias, request)

    def share_adapter(self, tenant: str, adapter: str, shared: Sequence[str]) -> adapter_service_pb2.Adapter:
        """Lets exactly these tenants use an adapter besides its owner."""
        request = adapter_service_pb2.ShareAdapterRequest(
            name=f"tenants/{tenant}/adapters/{adapter}", shared_tenants=[f"tenants/{other}" for other in shared]
        )
        return self._registry.call(self._adapters.ShareAdapter, request)

    # The transparency log: nothing of it is verified here, see `loraport.log`

    def get_checkpoint(self) -> log_service_pb2.Checkpoint:
        """Returns the registry's newest signed checkpoint."""
        return self._registry.call(self._log.GetCheckpoint, log_service_pb2.GetCheckpointRequest())

    def list_leaves(self, *, start: int = 0) -> Iterator[log_service_pb2.Leaf]:
        """Yields the leaves of the log from index `start`, in order."""
        return self._registry.pages(
            self._log.ListLeaves, log_service_pb2.ListLeavesRequest(start_index=start), "leaves"
        )

    def inclusion_proof(self, index: int, tree_size: int) -> log_service_pb2.InclusionProof:
        """Returns the proof that a leaf is in the tree of a size."""
        request = log_service_pb2.GetInclusionProofRequest(leaf_index=index, tree_size=tree_size)
        return self._registry.call(self._log.GetInclusionProof, request)

    def consistency_proof(self, old: int, new: int) -> log_service_pb2.ConsistencyProof:
        """Returns the proof that the log of `new` leaves begins with that of `old`."""
        request = log_service_pb2.GetConsistencyProofRequest(old_tree_size=old, new_tree_size=new)
        return self._registry.call(self._log.GetConsistencyProof, request)

    def list_audit_events(self, tenant: str | None = None) -> Iterator[audit_service_pb2.AuditEvent]:
        """Yields audit events, newest first, of one tenant or of all."""
        request = audit_service_pb2.ListAuditEventsRequest(tenant=f"tenants/{tenant}" if tenant else "")
        return self._registry.pages(self._audit.ListAuditEvents, request, "events")

    # The fleet, as the router sees it

    def residency(self) -> list[router_admin_service_pb2.ExecutorResidency]:
        """Returns which revisions are on which executor's device."""
        request = router_admin_service_pb2.ListResidencyRequest()
        return list(self._router.call(self._fleet.ListResidency, request).executors)

    def drain(self, executor: str, *, undrain: bool = False) -> router_admin_service_pb2.DrainExecutorResponse:
        """Has the router send no further request to an executor, or do so again. What runs there goes on.

        Raises:
            NotFoundError: EXECUTOR_NOT_FOUND.
        """
        request = router_admin_service_pb2.DrainExecutorRequest(executor=executor, undrain=undrain)
        return self._router.call(self._fleet.DrainExecutor, request)

    def fairness(self) -> router_admin_service_pb2.GetFairnessResponse:
        """Returns what every tenant has been charged, the bound on their spread, and the newest admissions."""
        return self._router.call(self._fleet.GetFairness, router_admin_service_pb2.GetFairnessRequest())

    def capacity(self) -> router_admin_service_pb2.Capacity:
        """Returns what was asked of every adapter pool of late, and whether the active sets fit."""
        return self._router.call(self._fleet.GetCapacity, router_admin_service_pb2.GetCapacityRequest())

    def queues(self) -> list[router_admin_service_pb2.TenantQueue]:
        """Returns the queues of all tenants that have requests queued or running."""
        return list(self._router.call(self._fleet.ListQueues, router_admin_service_pb2.ListQueuesRequest()).queues)
