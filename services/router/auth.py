"""Credentials of users: from `authorization: Bearer lk_…`, or an issuer's token, to the tenant that it speaks for."""

import hashlib
import hmac
import re
from collections.abc import Callable

from services.router.ports import Catalog
from services.router.tokens import TokenChecker
from services.shared.access import Principal
from services.shared.catalog import CatalogView, KeyItem
from services.shared.errors import LoraportError

AUTHORIZATION = "authorization"
_KEY = re.compile(r"lk_([a-z0-9]{10})_[0-9A-Za-z]{43}")
# Compared with when there is no such key, so that an unknown key takes the same way as a wrong one.
_DUMMY = bytes(32)


def check_key(view: CatalogView, secret: str, *, pepper: bytes, now: float) -> Principal | None:
    """Returns the principal of an API key, None unless the key is known, whole, unexpired and not revoked.

    `now` is seconds since the epoch.
    """
    match = _KEY.fullmatch(secret)
    if match is None:
        return None
    item = view.keys.get(match[1])
    digest = hmac.new(pepper, secret.encode(), hashlib.sha256).digest()
    same = hmac.compare_digest(digest, item.secret_hmac if item is not None else _DUMMY)
    if item is None or not same or not _opens(view, item, now):
        return None
    return Principal("user", item.tenant, f"tenants/{item.tenant}/keys/{item.key_id}", item.scopes)


def still_opens(view: CatalogView, principal: Principal, *, now: float) -> bool:
    """Says whether the credential that let `principal` in would let it in now. Long streams ask again and again."""
    if principal.expires is not None:
        return now < principal.expires and principal.role in view.tenants
    item = view.keys.get(principal.label.rpartition("/")[2])
    return item is not None and item.tenant == principal.role and _opens(view, item, now)


def _opens(view: CatalogView, item: KeyItem, now: float) -> bool:
    expired = item.expires is not None and now >= item.expires
    return not item.revoked and not expired and item.tenant in view.tenants


def bearer(metadata: dict[str, str]) -> str:
    """Returns the secret of an authorization header, or an empty string."""
    scheme, _, secret = metadata.get(AUTHORIZATION, "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


class Doorkeeper:
    """What a server asks who calls. `last_use` has when each API key last opened, seconds since the epoch, by its id.

    A key or tenant that was made a moment ago may not have arrived yet, so the view is brought up to date once before
    any credential that looks like one is refused, for whatever reason.
    """

    def __init__(self, catalog: Catalog, *, pepper: bytes, now: Callable[[], float], tokens: TokenChecker) -> None:
        self._catalog = catalog
        self._pepper = pepper
        self._now = now
        self._tokens = tokens
        self.last_use: dict[str, float] = {}

    async def __call__(self, metadata: dict[str, str]) -> Principal:
        """Returns who calls. Raises LoraportError (INVALID_CREDENTIAL, REGISTRY_UNAVAILABLE)."""
        secret = bearer(metadata)
        if "." in secret:  # no API key has one
            principal = await self._by_token(secret)
        else:
            principal = await self._by_key(secret)
        if principal is not None:
            return principal
        if not self._catalog.view.synced:
            raise LoraportError("REGISTRY_UNAVAILABLE", "the catalog has not arrived yet", retry_after_s=1.0)
        raise LoraportError("INVALID_CREDENTIAL")

    async def _by_key(self, secret: str) -> Principal | None:
        principal = check_key(self._catalog.view, secret, pepper=self._pepper, now=self._now())
        if principal is None and _KEY.fullmatch(secret):
            await self._catalog.catch_up()
            principal = check_key(self._catalog.view, secret, pepper=self._pepper, now=self._now())
        if principal is not None:
            self.last_use[principal.label.rpartition("/")[2]] = self._now()
        return principal

    async def _by_token(self, token: str) -> Principal | None:
        principal = await self._tokens.check(token, now=self._now())
        if principal is not None and principal.role not in self._catalog.view.tenants:
            await self._catalog.catch_up()
        return principal if principal is not None and principal.role in self._catalog.view.tenants else None
