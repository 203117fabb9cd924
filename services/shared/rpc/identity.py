"""From a TLS connection to a principal.

gRPC reports `peer_spiffe_id` only for a certificate with exactly one SPIFFE URI; no other field is ever an
identity. Service and admin identities come from two CAs, so the leaf's issuer is checked as well: the admin CA
cannot make a service, nor the service CA an admin.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from services.shared.access import Principal, spiffe_principal
from services.shared.errors import LoraportError

Issuer = Literal["service", "admin"]


class CertificateAuthorities:
    """The CAs that a server trusts, by what they may vouch for."""

    def __init__(self, pems: Mapping[Issuer, bytes]) -> None:
        self._authorities = {issuer: x509.load_pem_x509_certificate(pem) for issuer, pem in pems.items()}
        self.bundle = b"\n".join(pems.values())
        self._issuer_of = lru_cache(maxsize=1024)(self._find_issuer)

    @classmethod
    def from_files(cls, service_ca: str | Path, admin_ca: str | Path) -> "CertificateAuthorities":
        """Reads both CA certificates (PEM). Raises OSError or ValueError."""
        return cls({"service": Path(service_ca).read_bytes(), "admin": Path(admin_ca).read_bytes()})

    def principal(self, auth_context: Mapping[str, Sequence[bytes]]) -> Principal:
        """Returns who is at the other end of a connection.

        Raises:
            LoraportError: NOT_ALLOWED without exactly one SPIFFE id of this fleet from the right CA.
        """
        spiffe = auth_context.get("peer_spiffe_id", ())
        pem = auth_context.get("x509_pem_cert", ())
        if len(spiffe) != 1 or len(pem) != 1:
            raise LoraportError("NOT_ALLOWED", "this call needs a client certificate with one SPIFFE id")
        issuer = self._issuer_of(bytes(pem[0]))
        if issuer is None:
            raise LoraportError("NOT_ALLOWED", "the certificate is not one of this fleet")
        return spiffe_principal(spiffe[0].decode("ascii", "replace"), issuer=issuer)

    def _find_issuer(self, pem: bytes) -> Issuer | None:
        leaf = x509.load_pem_x509_certificate(pem)
        for issuer, authority in self._authorities.items():
            try:
                leaf.verify_directly_issued_by(authority)
            except (InvalidSignature, ValueError, TypeError):
                continue
            return issuer
        return None
