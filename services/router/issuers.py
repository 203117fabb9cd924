"""The public keys of token issuers: read from a configured file or https address, kept, and asked for rarely.

The last good set stays until a better one comes. A key id that is not known asks anew at most once a minute, so a flood
of invented ids is no flood of fetches; a set older than five minutes is renewed beside the calls that use it.
"""

import asyncio
import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey

from loraport.bundle.canonical import StrictJsonError, load_strict

log = structlog.get_logger()

MAX_SET_BYTES = 256 << 10
MAX_KEYS = 64
FETCH_S = 5.0
FRESH_S = 300.0
RETRY_S = 60.0
MIN_RSA_BITS = 2048
# Algorithm → what a key of it must say. A key serves one algorithm: whoever sends a token does not choose.
ALGORITHMS: Mapping[str, tuple[str, str]] = {
    "EdDSA": ("OKP", "Ed25519"),
    "ES256": ("EC", "P-256"),
    "RS256": ("RSA", ""),
}
_KINDS: Mapping[str, Any] = {"OKP": OKPKey, "EC": ECKey, "RSA": RSAKey}


@dataclass(frozen=True, slots=True)
class TokenIssuer:
    """Whose tokens open the door, as a router's configuration says.

    `issuer` is the exact `iss`, `audience` must be in `aud`, `tenant_claim` names the claim with the tenant's id.
    `jwks` is a file or an https address; `ca_file` (PEM) replaces the system's authorities for it.
    """

    issuer: str
    audience: str
    jwks: str
    algorithms: tuple[str, ...] = ("EdDSA", "ES256", "RS256")
    tenant_claim: str = "tenant"
    ca_file: str = ""

    def __post_init__(self) -> None:
        if not self.issuer or not self.audience or not self.jwks or not self.tenant_claim:
            raise ValueError("a token issuer needs issuer, audience, jwks and tenant_claim")
        if "://" in self.jwks:
            parts = urlsplit(self.jwks)
            if parts.scheme != "https" or not parts.hostname or parts.username is not None or parts.fragment:
                raise ValueError("jwks must be a file or an https address")
        if not self.algorithms or set(self.algorithms) - set(ALGORITHMS):
            raise ValueError(f"algorithms must be of {', '.join(ALGORITHMS)}")


Fetch = Callable[[TokenIssuer], Awaitable[bytes]]


def parse_keys(data: bytes) -> dict[tuple[str, str], Any]:
    """Returns (key id, algorithm) → public key of a JWK set; what is not for verifying tokens is left out.

    Raises:
        ValueError: it is no set, too large, or names one key twice.
    """
    try:
        value = load_strict(data, max_bytes=MAX_SET_BYTES, max_depth=6, allow_floats=True, wide_integers=True)
    except StrictJsonError as error:
        raise ValueError(error.detail) from None
    rows = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(rows, list) or len(rows) > MAX_KEYS:
        raise ValueError(f"it has no list of at most {MAX_KEYS} keys")
    found: dict[tuple[str, str], Any] = {}
    for row in rows:
        made = _key(row) if isinstance(row, dict) else None
        if made is None:
            continue
        place, key = made
        if place in found:
            raise ValueError("it names one key twice")
        found[place] = key
    return found


def _key(row: Mapping[str, Any]) -> tuple[tuple[str, str], Any] | None:
    kind, curve, name = row.get("kty"), row.get("crv", ""), row.get("kid")
    algorithm = next((alg for alg, wanted in ALGORITHMS.items() if wanted == (kind, curve)), None)
    fits = row.get("use", "sig") == "sig" and row.get("alg", algorithm) in (algorithm, curve)
    if algorithm is None or not isinstance(name, str) or not 0 < len(name) <= 256 or not fits:
        return None
    try:
        public = {field: row[field] for field in ("kty", "crv", "x", "y", "n", "e") if field in row}
        key = _KINDS[str(kind)].import_key(public)
        bits = getattr(key.public_key, "key_size", MIN_RSA_BITS)
    except (JoseError, ValueError, TypeError, KeyError):
        return None
    return None if kind == "RSA" and bits < MIN_RSA_BITS else ((name, algorithm), key)


class IssuerKeys:
    """See the module's text. Belongs to one event loop. `now` does not go back."""

    def __init__(self, issuer: TokenIssuer, *, now: Callable[[], float], fetch: Fetch | None = None) -> None:
        self.issuer = issuer
        self._now = now
        self._fetch = fetch or read_set
        self._keys: dict[tuple[str, str], Any] = {}
        self._tried: float | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def find(self, key_id: str, algorithm: str) -> Any | None:
        """Returns a key, or None."""
        known = (key_id, algorithm) in self._keys
        age = self._now() - self._tried if self._tried is not None else FRESH_S
        if age >= (FRESH_S if known else RETRY_S) and (self._renewal is None or self._renewal.done()):
            self._tried = self._now()
            self._renewal = asyncio.create_task(self._renew())
        if not known and self._renewal is not None and not self._renewal.done():
            # Who leaves early does not end the fetch: others wait for it.
            await asyncio.wait({self._renewal}, timeout=FETCH_S + 1)
        return self._keys.get((key_id, algorithm))

    async def stop(self) -> None:
        """Ends a fetch that is under way."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(FETCH_S):
                self._keys = parse_keys(await self._fetch(self.issuer))
        except (OSError, ValueError, http.client.HTTPException) as error:
            # TimeoutError is an OSError. What was known stays.
            log.warning("token issuer's keys not renewed", issuer=self.issuer.issuer, why=type(error).__name__)


async def read_set(issuer: TokenIssuer) -> bytes:
    """Reads an issuer's key set off the event loop. Raises OSError, ValueError or HTTPException."""
    if "://" not in issuer.jwks:
        return await asyncio.to_thread(_read_file, issuer.jwks)
    parts = urlsplit(issuer.jwks)
    context = ssl.create_default_context(cafile=issuer.ca_file or None)
    connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=FETCH_S, context=context)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        return await asyncio.to_thread(_get, connection, target)
    finally:
        # A thread that still reads must not go on for ever when its time is over.
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _read_file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(MAX_SET_BYTES + 1)


def _get(connection: http.client.HTTPSConnection, target: str) -> bytes:
    """One GET; no redirect is followed, and no more is read than a set may have, nor longer than a fetch may take."""
    ends = time.monotonic() + FETCH_S
    try:
        connection.request("GET", target, headers={"Accept": "application/json", "Accept-Encoding": "identity"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"it answered {response.status}")
        data = bytearray()
        while len(data) <= MAX_SET_BYTES:
            part = response.read1(1 << 16)
            if not part:
                return bytes(data)
            if time.monotonic() > ends:
                raise TimeoutError
            data += part
        raise ValueError("it is too large")
    finally:
        connection.close()
