import pytest

from services.shared.access import POLICIES, Principal, authorize, require_policies, spiffe_principal
from services.shared.errors import LoraportError

ROUTER = "spiffe://loraport.local/service/router"


def test_a_service_is_a_peer_and_an_admin_is_an_admin() -> None:
    assert spiffe_principal(ROUTER, issuer="service").role == "router"
    assert spiffe_principal("spiffe://loraport.local/admin/ops", issuer="admin").plane == "admin"
    assert spiffe_principal("spiffe://loraport.local/service/executor/e1", issuer="service").role == "executor"


@pytest.mark.parametrize(
    ("spiffe_id", "issuer"),
    [
        (ROUTER, "admin"),  # the admin CA cannot make a service
        ("spiffe://loraport.local/admin/ops", "service"),
        ("spiffe://evil.example/service/router", "service"),
        ("spiffe://loraport.local/service/router/x/y", "service"),
        ("spiffe://loraport.local/service/", "service"),
        ("spiffe://loraport.local/service/router\n", "service"),
        ("https://loraport.local/service/router", "service"),
        ("", "service"),
    ],
)
def test_other_identities_are_nobody(spiffe_id: str, issuer: str) -> None:
    with pytest.raises(LoraportError) as caught:
        spiffe_principal(spiffe_id, issuer=issuer)
    assert caught.value.reason == "NOT_ALLOWED"


PRINCIPALS = {
    "admin": Principal("admin", "ops", "ops"),
    "router": Principal("peer", "router", "router"),
    "loader": Principal("peer", "loader", "loader"),
    "executor": Principal("peer", "executor", "executor"),
    "user": Principal("user", "acme", "acme", frozenset({"generate", "list"})),
    "powerless user": Principal("user", "acme", "acme"),
    "session": Principal("session", "anonymous", "anonymous"),
    "health": Principal("health", "anonymous", "anonymous"),
}


@pytest.mark.parametrize("method", POLICIES)
@pytest.mark.parametrize("who", PRINCIPALS)
def test_only_the_policys_planes_roles_and_scopes_pass(method: str, who: str) -> None:
    principal, policy = PRINCIPALS[who], POLICIES[method]
    expected = principal.plane in policy.planes
    if principal.plane == "peer":
        expected &= principal.role in policy.roles
    if principal.plane == "user":
        expected &= policy.scope in principal.scopes
    try:
        authorize(method, principal)
        passed = True
    except LoraportError:
        passed = False
    assert passed == expected


@pytest.mark.parametrize(
    "method",
    ["loraport.router.v1.InferenceService/Generate", "//loraport.router.v1.InferenceService/Generate", "", "/x.Y/Z"],
)
def test_a_method_outside_the_table_passes_nobody(method: str) -> None:
    for principal in PRINCIPALS.values():
        with pytest.raises(LoraportError):
            authorize(method, principal)
    with pytest.raises(ValueError, match="no access policy"):
        require_policies([method])


def test_no_user_reaches_the_admin_or_peer_plane() -> None:
    for method, policy in POLICIES.items():
        if "user" in policy.planes:
            assert policy.planes == {"user"}, method
            assert policy.scope, method
