"""What proves identity in a local stack: certificates, role keys, shared secrets.

Made once per data directory and kept, so that a stack may be restarted; certificates are issued again before they
expire. Every private file is created with mode 0600 in a directory of mode 0700.
"""

import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from loraport.bundle.envelope import SigningKey, sign_envelope
from loraport.dev.layout import Layout
from loraport.dev.pki import Pair, days_left, make_ca, make_leaf
from loraport.trust.edit import first_root, next_root
from loraport.trust.files import read_chain, write_root
from loraport.trust.root import PAYLOAD_TYPE, Role
from loraport.whole_file import replace_file

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
    ensure_trust(layout)
    for name in ("pepper", "valkey"):
        _ensure_secret(layout.secret(name), secrets.token_hex(32))
    # The object store wants access keys of more than a few characters.
    _ensure_secret(layout.secret("s3"), f"loraport-local\n{secrets.token_hex(24)}")


def ensure_trust(layout: Layout) -> None:
    """Makes the roles' keys and the first trust root, or the next one before the newest expires.

    A stack of an earlier release had the services' keys and no root: they go on under a root that names them.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the trust directory holds something else than a chain of roots, or the root key is missing.
    """
    now = int(datetime.now(UTC).timestamp())
    if not any(layout.trust.glob("*.root.json")):
        keys = {role: _role_key(layout, role) for role in Role}
        root = first_root({role: [key.public_pem] for role, key in keys.items()}, now=now)
        write_root(layout.trust, root, sign_envelope(PAYLOAD_TYPE, root.body(), keys[Role.ROOT]))
        for stale in layout.trust.glob("*.pub"):
            stale.unlink()
        return
    root = read_chain(layout.trust)[-1][0]
    if (root.expires - now) / 86400 < RENEW_BELOW_DAYS:
        found = [SigningKey.load(path) for path in sorted(layout.trust.glob("root*.key"))]
        holders = [key for key in found if key.key_id in root.roles[Role.ROOT].key_ids]
        if len(holders) < root.roles[Role.ROOT].threshold:
            raise ValueError("the trust root expires soon; sign a new one: loraport trust rotate --draft FILE")
        renewed = next_root(root, now=now)
        write_root(layout.trust, renewed, sign_envelope(PAYLOAD_TYPE, renewed.body(), holders))


def s3_credentials(layout: Layout) -> tuple[str, str]:
    """Returns (access key, secret key) of the stack's object store. Raises OSError."""
    access, secret = layout.secret("s3").read_text().split("\n")[:2]
    return access, secret


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read, whole or not at all. Raises OSError."""
    replace_file(path, [data])


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


def _role_key(layout: Layout, role: str) -> SigningKey:
    private = layout.trust / f"{role}.key"
    if not private.exists():
        SigningKey.generate().save(private)
    return SigningKey.load(private)


def _ensure_secret(path: Path, value: str) -> None:
    if not path.exists():
        write_private(path, value.encode())
