"""Page tokens of the user plane: sealed, bound to the tenant, valid for a day."""

import base64
import binascii
import hashlib
import hmac

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict
from services.shared.errors import FaultList, LoraportError

DEFAULT_SIZE, MAX_SIZE = 50, 500
LIFE_S = 24 * 3600
_MAC_BYTES = 32


def page_size(asked: int) -> int:
    """Returns how many items a page has: 0 is the default, too many is the maximum.

    Raises:
        LoraportError: INVALID_REQUEST for a negative number.
    """
    faults = FaultList()
    faults.require(asked >= 0, "page_size", "must not be negative")
    faults.raise_if_any()
    return min(asked or DEFAULT_SIZE, MAX_SIZE)


def derive_key(pepper: bytes) -> bytes:
    """Returns the key that all routers of a fleet seal page tokens with."""
    return hmac.new(pepper, b"loraport.router.page-token.v1", hashlib.sha256).digest()


def seal(key: bytes, *, tenant: str, last: str, now: float) -> str:
    """Returns the token for the page after the item `last`."""
    body = canonical({"tenant": tenant, "last": last, "expires": int(now) + LIFE_S})
    return base64.urlsafe_b64encode(_mac(key, body) + body).decode()


def unseal(key: bytes, token: str, *, tenant: str, now: float) -> str:
    """Returns the item after which the page begins; an empty token begins at the start.

    Raises:
        LoraportError: INVALID_PAGE_TOKEN.
    """
    if not token:
        return ""
    try:
        data = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(key, body)):
            raise LoraportError("INVALID_PAGE_TOKEN")
        value = load_strict(body, max_bytes=4096, max_depth=1)
    except (binascii.Error, UnicodeEncodeError, StrictJsonError):
        raise LoraportError("INVALID_PAGE_TOKEN") from None
    if value["tenant"] != tenant or now > value["expires"]:
        raise LoraportError("INVALID_PAGE_TOKEN")
    return str(value["last"])


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).digest()
