"""API keys: from `authorization: Bearer lk_…` to the tenant that it speaks for."""

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable

from services.router.ports import Catalog
from services.shared.access import Principal
from services.shared.catalog import CatalogView, KeyItem
from services.shared.errors import LoraportError

AUTHORIZATION = "authorization"
CATCH_UP_S = 0.2
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
    """Says whether the key that let `principal` in would let it in now. Long streams ask again and again."""
    item = view.keys.get(principal.label.rpartition("/")[2])
    return item is not None and item.tenant == principal.role and _opens(view, item, now)


def _opens(view: CatalogView, item: KeyItem, now: float) -> bool:
    expired = item.expires is not None and now >= item.expires
    return not item.revoked and not expired and item.tenant in view.tenants


def bearer(metadata: dict[str, str]) -> str:
    """Returns the secret of an authorization header, or an empty string."""
    scheme, _, secret = metadata.get(AUTHORIZATION, "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def authenticator(
    catalog: Catalog, *, pepper: bytes, now: Callable[[], float]
) -> Callable[[dict[str, str]], Awaitable[Principal]]:
    """Returns what a server asks who calls.

    A key that was made a moment ago may not have arrived yet, so the view is brought up to date once before any key
    is refused, for whatever reason.
    """

    async def authenticate(metadata: dict[str, str]) -> Principal:
        secret = bearer(metadata)
        principal = check_key(catalog.view, secret, pepper=pepper, now=now())
        if principal is None and _KEY.fullmatch(secret):
            await catalog.catch_up(CATCH_UP_S)
            principal = check_key(catalog.view, secret, pepper=pepper, now=now())
        if principal is not None:
            return principal
        if not catalog.view.synced:
            raise LoraportError("REGISTRY_UNAVAILABLE", "the catalog has not arrived yet", retry_after_s=1.0)
        raise LoraportError("INVALID_CREDENTIAL")

    return authenticate
