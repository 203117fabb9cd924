"""Who may call what: one table, deny by default.

A method that is not in `POLICIES` cannot be served: a server refuses to start with one, and a call to an unknown
method never reaches a handler. Identity comes from exactly one SPIFFE id in a client certificate (planes `peer` and
`admin`), from an API key or a configured issuer's token (plane `user`), or from a signed upload session that the
handler itself checks (plane `session`). Nothing that a caller writes into a request is an identity.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from services.shared.errors import LoraportError

Plane = Literal["user", "admin", "peer", "session", "health"]

TRUST_DOMAIN = "loraport.local"
_SPIFFE = re.compile(
    r"spiffe://(?P<domain>[a-z0-9.-]{1,255})/(?P<kind>service|admin)/(?P<role>[a-z0-9-]{1,63})(/(?P<name>[a-z0-9-]{1,63}))?"
)


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    `role` is a service's name on the peer plane, the tenant's id on the user plane. `label` names the caller in
    logs and audit events and holds no secret. `expires` is when the credential itself ends, seconds since the epoch;
    None where something else says so.
    """

    plane: Plane
    role: str
    label: str
    scopes: frozenset[str] = frozenset()
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may call a method: the planes, on the peer plane the roles, on the user plane the scope."""

    planes: frozenset[Plane]
    roles: frozenset[str] = frozenset()
    scope: str = ""


def _policy(*planes: Plane, roles: Iterable[str] = (), scope: str = "") -> Policy:
    return Policy(frozenset(planes), frozenset(roles), scope)


_ADMIN = _policy("admin")
_ADMIN_OR_PEER = _policy("admin", "peer", roles=("router", "loader", "executor"))
_ROUTER = _policy("peer", roles=("router",))
_EXECUTOR = _policy("peer", roles=("executor",))
_LOADER = _policy("peer", roles=("loader",))
_PEERS = _policy("peer", roles=("router", "loader", "executor"))


def _service(name: str, policies: dict[str, Policy]) -> dict[str, Policy]:
    return {f"/loraport.{name}/{method}": policy for method, policy in policies.items()}


POLICIES = MappingProxyType(
    _service(
        "router.v1.InferenceService",
        {
            "Generate": _policy("user", scope="generate"),
            "Score": _policy("user", scope="generate"),
            "CountTokens": _policy("user", scope="generate"),
            "ListAdapters": _policy("user", scope="list"),
            "GetAdapter": _policy("user", scope="list"),
            "ReportOutcome": _policy("user", scope="generate"),
        },
    )
    | _service(
        "router.v1.RouterAdminService",
        dict.fromkeys(
            (
                "ListQueues",
                "GetFairness",
                "GetCapacity",
                "ExplainPlacement",
                "ListResidency",
                "DrainExecutor",
                "GetQuotaUsage",
            ),
            _ADMIN,
        ),
    )
    | _service(
        "registry.v1.TenantService",
        dict.fromkeys(("CreateTenant", "GetTenant", "ListTenants", "SetTenantQuota"), _ADMIN),
    )
    | _service(
        "registry.v1.KeyService",
        dict.fromkeys(
            (
                "CreateApiKey",
                "ListApiKeys",
                "RevokeApiKey",
                "RotateApiKey",
                "CreateSigner",
                "ListSigners",
                "RevokeSigner",
                "GetDelegation",
                "SetSignerThreshold",
            ),
            _ADMIN,
        ),
    )
    | _service(
        "registry.v1.BaseModelService",
        {"CreateBaseModel": _ADMIN, "GetBaseModel": _ADMIN_OR_PEER, "ListBaseModels": _ADMIN_OR_PEER},
    )
    | _service(
        "registry.v1.AdapterService",
        {
            **dict.fromkeys(
                (
                    "RegisterRevision",
                    "ApproveRevision",
                    "RevokeRevision",
                    "ListRevisions",
                    "GetAdapter",
                    "ListAdapters",
                    "SetAlias",
                    "DeleteAlias",
                    "ShareAdapter",
                ),
                _ADMIN,
            ),
            "GetRevision": _ADMIN_OR_PEER,
            "AdmitRevision": _LOADER,
        },
    )
    | _service(
        "registry.v1.RolloutService",
        {
            **dict.fromkeys(("StartRollout", "GetRollout", "ListRollouts", "WatchRollout", "ControlRollout"), _ADMIN),
            **dict.fromkeys(("ReportReadiness", "ReportProbe", "ReportObservations"), _ROUTER),
        },
    )
    | _service(
        "registry.v1.LogService",
        dict.fromkeys(("GetCheckpoint", "GetInclusionProof", "GetConsistencyProof", "ListLeaves"), _ADMIN_OR_PEER),
    )
    | _service("registry.v1.TrustService", {"SubmitTrustRoot": _ADMIN, "ListTrustRoots": _ADMIN_OR_PEER})
    | _service("registry.v1.AuditService", {"ListAuditEvents": _ADMIN})
    | _service("registry.v1.CatalogService", {"Watch": _PEERS, "GetEpoch": _PEERS})
    | _service(
        "loader.v1.LoaderService",
        {
            "Upload": _policy("session"),
            "Import": _policy("session"),
            "EnsureHost": _EXECUTOR,
            "ReadBlob": _EXECUTOR,
            "ReleaseHost": _EXECUTOR,
            "Inventory": _policy("admin", "peer", roles=("router", "executor")),
            "CancelLoad": _EXECUTOR,
        },
    )
    | _service(
        "executor.v1.ExecutorService",
        {
            "Execute": _ROUTER,
            "ExecuteMany": _ROUTER,
            "EnsureDevice": _ROUTER,
            "Preload": _ROUTER,
            "Evict": _ROUTER,
            "Probe": _ROUTER,
            "State": _policy("admin", "peer", roles=("router", "loader")),
            "Drain": _policy("admin", "peer", roles=("router",)),
            "SetMode": _policy("admin"),
        },
    )
    | _service(
        "telemetry.v1.TelemetryService",
        dict.fromkeys(("GetProcess", "GetTrace", "GetMetrics", "RunChecks"), _ADMIN),
    )
    # Health says SERVING or NOT_SERVING and nothing else, so orchestrators may ask without an identity.
    | {"/grpc.health.v1.Health/Check": _policy("health"), "/grpc.health.v1.Health/Watch": _policy("health")}
)


def require_policies(methods: Iterable[str]) -> None:
    """Raises ValueError naming every method that has no policy. Called before a server starts."""
    missing = sorted(set(methods) - set(POLICIES))
    if missing:
        raise ValueError(f"no access policy for {', '.join(missing)}; add it to services/shared/access.py")


def spiffe_principal(spiffe_id: str, *, issuer: Literal["service", "admin"]) -> Principal:
    """Returns the principal of a SPIFFE id whose certificate was issued by the CA of `issuer`.

    Raises:
        LoraportError: NOT_ALLOWED when the id is malformed, of another trust domain, or of a kind that the issuer
            may not vouch for.
    """
    match = _SPIFFE.fullmatch(spiffe_id)
    if match is None or match["domain"] != TRUST_DOMAIN or match["kind"] != issuer:
        raise LoraportError("NOT_ALLOWED", "the certificate is not one of this fleet")
    return Principal("admin" if issuer == "admin" else "peer", match["role"], spiffe_id)


def authorize(method: str, principal: Principal) -> None:
    """Checks a caller against the table.

    Raises:
        LoraportError: NOT_ALLOWED.
    """
    policy = POLICIES.get(method)
    allowed = (
        policy is not None
        and principal.plane in policy.planes
        and (principal.plane != "peer" or principal.role in policy.roles)
        and (principal.plane != "user" or policy.scope in principal.scopes)
    )
    if not allowed:
        raise LoraportError("NOT_ALLOWED", f"{principal.label} may not call {method.rsplit('/', 1)[-1]}")
