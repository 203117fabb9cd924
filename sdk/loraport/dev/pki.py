"""Certificates of a throw-away fleet: a CA, and leaves that each carry exactly one SPIFFE id.

For local stacks and tests. Keys are EC P-256; everything is PEM.
"""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLOCK_SLACK = timedelta(minutes=5)


class Pair(NamedTuple):
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


def make_ca(common_name: str, *, days: int = 3650) -> Pair:
    """Returns a self-signed CA that may issue leaves only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(common_name)
    builder = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
    )
    return _finish(builder, key, key)


def make_leaf(
    ca: tuple[bytes, bytes],
    *,
    uri: str | Sequence[str],
    dns: Sequence[str] = ("localhost",),
    ips: Sequence[str] = ("127.0.0.1",),
    days: float = 365,
) -> Pair:
    """Returns a leaf issued by `ca` (certificate, key) whose one URI SAN is `uri`; it may serve and call.

    A fleet only ever makes leaves with one URI; tests make others, to see them refused.

    Raises:
        ValueError: `ca` is not a pair of PEM documents, or an entry of `ips` is no address.
    """
    issuer = x509.load_pem_x509_certificate(ca[0])
    issuer_key = serialization.load_pem_private_key(ca[1], password=None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the CA's key is not an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    uris = (uri,) if isinstance(uri, str) else tuple(uri)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(value) for value in uris]
    names += [x509.DNSName(host) for host in dns]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ips]
    builder = (
        _builder(_name(uris[0].rsplit("/", 1)[-1] if uris else "nobody"), issuer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(sign_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    return _finish(builder, key, issuer_key)


def days_left(certificate: bytes, *, now: datetime) -> float:
    """Returns how many days a certificate (PEM) is still valid; negative when it has expired."""
    end = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return (end - now).total_seconds() / 86400


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _finish(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> Pair:
    certificate = builder.sign(signer, hashes.SHA256())
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
