"""Access tokens of other issuers (RFC 9068): from `authorization: Bearer <jwt>` to the tenant of a signed claim.

The header of a token chooses among the configured keys by their id and says nothing else: addresses and keys in it
(`jku`, `jwk`, `x5u`, `x5c`) are ignored, `crit` is refused, and the algorithm must be the one of that key.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable
from typing import Any

from joserfc import jws
from joserfc.errors import JoseError

from loraport.bundle.canonical import StrictJsonError, load_strict
from services.router.issuers import IssuerKeys, TokenIssuer
from services.shared.access import Principal

MAX_TOKEN = 8 << 10
SKEW_S = 60
MAX_LIFE_S = 900
MAX_CLAIM = 256
TYPES = ("at+jwt", "application/at+jwt")
SCOPES = frozenset({"generate", "list"})
_REQUIRED = ("iss", "sub", "client_id", "jti")


class TokenChecker:
    """Checks tokens of the configured issuers."""

    def __init__(self, issuers: Iterable[IssuerKeys]) -> None:
        self._issuers = {keys.issuer.issuer: keys for keys in issuers}

    async def check(self, token: str, *, now: float) -> Principal | None:
        """Returns the principal of a token, None unless everything about it is right. `now`: seconds since the epoch.

        Whether there is such a tenant is not looked at.
        """
        parts = token.split(".") if len(token) <= MAX_TOKEN and token.isascii() else []
        if len(parts) != 3:  # five are an encrypted one
            return None
        header, claims = _object(parts[0]), _object(parts[1])
        if header is None or claims is None or not _usable(header):
            return None
        issuer = claims.get("iss")
        keys = self._issuers.get(issuer) if isinstance(issuer, str) else None
        # RFC 9864 calls the same algorithm by the name of its curve.
        algorithm = "EdDSA" if header["alg"] == "Ed25519" else header["alg"]
        if keys is None or algorithm not in keys.issuer.algorithms:
            return None
        key = await keys.find(header["kid"], algorithm)
        if key is None or not _signed(token, key, header["alg"]):
            return None
        return principal_of(claims, keys.issuer, now=now)

    async def stop(self) -> None:
        """Ends fetches that are under way."""
        for keys in self._issuers.values():
            await keys.stop()


def principal_of(claims: dict[str, Any], issuer: TokenIssuer, *, now: float) -> Principal | None:
    """Returns the principal of claims whose signature is right, None unless they are."""
    texts = [claims.get(name) for name in (*_REQUIRED, issuer.tenant_claim)]
    if any(not isinstance(text, str) or not 0 < len(text) <= MAX_CLAIM for text in texts):
        return None
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    times = [claims.get(name, 0) for name in ("iat", "exp", "nbf")]
    if any(type(time) not in (int, float) for time in times) or not {"iat", "exp"} <= claims.keys():
        return None
    issued, expires, begins = times
    good = (
        claims["iss"] == issuer.issuer
        and issuer.audience in audiences
        and issued <= now + SKEW_S
        and begins <= now + SKEW_S
        and now < expires + SKEW_S
        and 0 < expires - issued <= MAX_LIFE_S
    )
    scope = claims.get("scope", "")
    if not good or not isinstance(scope, str):
        return None
    tenant = claims[issuer.tenant_claim]
    who = hashlib.sha256(f"{issuer.issuer}\0{claims['sub']}".encode()).hexdigest()[:16]
    scopes = SCOPES & set(scope.split())
    return Principal("user", tenant, f"tenants/{tenant}/subjects/{who}", scopes, expires + SKEW_S)


def _usable(header: dict[str, Any]) -> bool:
    names = isinstance(header.get("alg"), str) and isinstance(header.get("kid"), str)
    kind = str(header.get("typ", "")).lower()
    return names and kind in TYPES and "crit" not in header and "b64" not in header


def _object(part: str) -> dict[str, Any] | None:
    try:
        data = base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
        value = load_strict(data, max_bytes=MAX_TOKEN, max_depth=8, allow_floats=True, wide_integers=True)
    except (StrictJsonError, binascii.Error, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _signed(token: str, key: Any, algorithm: str) -> bool:
    try:
        jws.deserialize_compact(token, key, algorithms=[algorithm])
    except (JoseError, ValueError, TypeError):
        return False
    return True
