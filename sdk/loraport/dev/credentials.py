"""What proves identity in a local stack: certificates, role keys, shared secrets.

Made once per data directory and kept, so that a stack may be restarted; certificates are issued again before they
expire. Every private file is created with mode 0600 in a directory of mode 0700.
"""

import os
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from loraport.bundle.envelope import SigningKey
from loraport.dev.layout import Layout
from loraport.dev.pki import Pair, days_left, make_ca, make_leaf

TRUST_DOMAIN = "loraport.local"
ROLES = ("registry", "loader", "router")
RENEW_BELOW_DAYS = 30.0


def ensure_credentials(layout: Layout, executors: Iterable[str]) -> None:
    """Makes what is missing or about to expire.

    Raises:
        OSError: the data directory cannot be written.
    """
    for name in ("pki", "trust", "secrets", "keys", "signers"):
        (layout.data / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.now(UTC)
    service_ca = _ensure_ca(layout, "ca", "loraport local services", now)
    admin_ca = _ensure_ca(layout, "admin-ca", "loraport local admins", now)
    for role in ROLES:
        _ensure_leaf(layout, role, service_ca, f"service/{role}", now)
    for executor in executors:
        _ensure_leaf(layout, executor, service_ca, f"service/executor/{executor}", now)
    _ensure_leaf(layout, "admin", admin_ca, "admin/local", now)
    for role in ROLES:
        _ensure_role_key(layout, role)
    for name in ("pepper", "valkey"):
        _ensure_secret(layout.secret(name), secrets.token_hex(32))
    # The object store wants access keys of more than a few characters.
    _ensure_secret(layout.secret("s3"), f"loraport-local\n{secrets.token_hex(24)}")


def s3_credentials(layout: Layout) -> tuple[str, str]:
    """Returns (access key, secret key) of the stack's object store. Raises OSError."""
    access, secret = layout.secret("s3").read_text().split("\n")[:2]
    return access, secret


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read, whole or not at all. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _ensure_ca(layout: Layout, name: str, common_name: str, now: datetime) -> Pair:
    certificate, key = layout.certificate(name), layout.private_key(name)
    if not (certificate.exists() and key.exists()) or days_left(certificate.read_bytes(), now=now) < RENEW_BELOW_DAYS:
        _write_pair(certificate, key, make_ca(common_name))
        for leaf in layout.certificate(name).parent.glob("*.pem"):
            if leaf.stem not in ("ca", "admin-ca"):
                leaf.unlink()
    return Pair(certificate.read_bytes(), key.read_bytes())


def _ensure_leaf(layout: Layout, name: str, ca: Pair, path: str, now: datetime) -> None:
    certificate, key = layout.certificate(name), layout.private_key(name)
    if certificate.exists() and key.exists() and days_left(certificate.read_bytes(), now=now) > RENEW_BELOW_DAYS:
        return
    _write_pair(certificate, key, make_leaf(ca, uri=f"spiffe://{TRUST_DOMAIN}/{path}"))


def _write_pair(certificate: Path, key: Path, pair: Pair) -> None:
    write_private(key, pair.key)
    write_private(certificate, pair.certificate)


def _ensure_role_key(layout: Layout, role: str) -> None:
    private, public = layout.trust / f"{role}.key", layout.trust / f"{role}.pub"
    if not private.exists():
        SigningKey.generate().save(private)
    write_private(public, SigningKey.load(private).public_pem)


def _ensure_secret(path: Path, value: str) -> None:
    if not path.exists():
        write_private(path, value.encode())
