from datetime import UTC, datetime

import pytest
from cryptography import x509

from loraport.dev.pki import days_left, make_ca, make_leaf
from services.shared.rpc.identity import CertificateAuthorities

ROUTER = "spiffe://loraport.local/service/router"
ADMIN = "spiffe://loraport.local/admin/local"


def context(uri: str, certificate: bytes) -> dict[str, list[bytes]]:
    return {"peer_spiffe_id": [uri.encode()], "x509_pem_cert": [certificate]}


def test_a_leaf_has_exactly_one_uri_and_the_loopback_names() -> None:
    leaf = make_leaf(make_ca("ca"), uri=ROUTER)
    names = x509.load_pem_x509_certificate(leaf.certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.UniformResourceIdentifier) == [ROUTER]
    assert names.value.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in names.value.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_services_accept_what_is_made_here() -> None:
    service_ca, admin_ca = make_ca("services"), make_ca("admins")
    authorities = CertificateAuthorities({"service": service_ca.certificate, "admin": admin_ca.certificate})
    router = make_leaf(service_ca, uri=ROUTER)
    admin = make_leaf(admin_ca, uri=ADMIN)
    assert authorities.principal(context(ROUTER, router.certificate)).role == "router"
    assert authorities.principal(context(ADMIN, admin.certificate)).plane == "admin"


def test_days_left_counts_down_to_the_end() -> None:
    leaf = make_leaf(make_ca("ca"), uri=ROUTER, days=10)
    assert 9.9 < days_left(leaf.certificate, now=datetime.now(UTC)) < 10.1


def test_a_ca_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="PEM"):
        make_leaf((b"", b""), uri=ROUTER)
