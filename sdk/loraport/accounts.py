"""The admin plane's calls about what a tenant may use up, and about replacing its keys: `AdminClient.accounts`."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from loraport.registry.v1 import key_service_pb2, key_service_pb2_grpc, tenant_service_pb2, tenant_service_pb2_grpc
from loraport.router.v1 import router_admin_service_pb2, router_admin_service_pb2_grpc

T = TypeVar("T")


class Peer(Protocol):
    """One service's address."""

    channel: Any

    def call(self, method: Callable[..., T], request: Any) -> T:
        """Calls a method. Raises LoraportError."""


class Accounts:
    """See the module's text. Methods return the messages of the services' contracts and raise LoraportError."""

    def __init__(self, registry: Peer, router: Peer) -> None:
        self._registry = registry
        self._router = router
        self._tenants: Any = tenant_service_pb2_grpc.TenantServiceStub(registry.channel)
        self._keys: Any = key_service_pb2_grpc.KeyServiceStub(registry.channel)
        self._doors: Any = router_admin_service_pb2_grpc.RouterAdminServiceStub(router.channel)

    def get_tenant(self, tenant: str) -> tenant_service_pb2.Tenant:
        """Returns a tenant with its quotas and what it keeps at the registry."""
        request = tenant_service_pb2.GetTenantRequest(name=f"tenants/{tenant}")
        return self._registry.call(self._tenants.GetTenant, request)

    def set_quota(self, tenant: str, **limits: int) -> tenant_service_pb2.Tenant:
        """Sets all of a tenant's quotas; what is left out is without a quota. Raises ValueError for an unknown name."""
        quota = tenant_service_pb2.TenantQuota(**limits)
        request = tenant_service_pb2.SetTenantQuotaRequest(name=f"tenants/{tenant}", quota=quota)
        return self._registry.call(self._tenants.SetTenantQuota, request)

    def quota_usage(self, tenant: str) -> router_admin_service_pb2.QuotaUsage:
        """Returns what a tenant has used of the quotas that routers keep."""
        request = router_admin_service_pb2.GetQuotaUsageRequest(tenant=f"tenants/{tenant}")
        return self._router.call(self._doors.GetQuotaUsage, request)

    def rotate_api_key(self, tenant: str, key: str, *, overlap_s: int = 0) -> key_service_pb2.RotateApiKeyResponse:
        """Makes a key in the place of another, which still opens for `overlap_s` seconds; the secret is shown now."""
        request = key_service_pb2.RotateApiKeyRequest(name=f"tenants/{tenant}/keys/{key}")
        request.overlap.seconds = overlap_s
        return self._registry.call(self._keys.RotateApiKey, request)
