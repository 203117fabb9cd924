"""Pages of a list: sizes, and tokens that only the list that made them accepts.

A token holds the ordering key of the last item, sealed with AES-SIV under a key made from the fleet's pepper and a
purpose. The associated data is the list and its filter, so a token of one service, list, tenant or fleet is refused by
another. All processes of one service open each other's tokens.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from loraport.bundle.canonical import canonical, load_strict
from services.shared.errors import LoraportError

DEFAULT_PAGE = 50
MAX_PAGE = 500
MAX_TOKEN = 1024

Key = tuple[str | int, ...]


def page_size(requested: int, *, most: int = MAX_PAGE) -> int:
    """Returns the number of items of a page: 0 means 50, above `most` is read as `most`.

    Raises:
        LoraportError: INVALID_REQUEST for a negative number.
    """
    if requested < 0:
        raise LoraportError("INVALID_REQUEST", "page_size must not be negative", subject="page_size")
    return min(requested or DEFAULT_PAGE, most)


class PageTokens:
    """Seals and opens page tokens. `purpose` names the service and plane whose lists they are for."""

    def __init__(self, pepper: bytes, *, purpose: str) -> None:
        label = f"loraport {purpose} page tokens v1"
        self._cipher = AESSIV(hmac.digest(pepper, label.encode("ascii"), hashlib.sha512))

    def seal(self, last: Key, *, scope: Sequence[str]) -> str:
        """Returns the token of the page after the item with the ordering key `last`, for the list `scope`."""
        sealed = self._cipher.encrypt(canonical(list(last)), [_context(scope)])
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def open(self, token: str, *, scope: Sequence[str], kinds: tuple[type, ...]) -> Key | None:
        """Returns the ordering key in `token`, whose parts are of `kinds`; None for the first page.

        Raises:
            LoraportError: INVALID_PAGE_TOKEN, the token was not made for this list.
        """
        if not token:
            return None
        try:
            if len(token) > MAX_TOKEN:
                raise ValueError
            sealed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            key = tuple(load_strict(self._cipher.decrypt(sealed, [_context(scope)]), max_bytes=MAX_TOKEN, max_depth=1))
            if tuple(map(type, key)) != kinds:
                raise ValueError
        except (InvalidTag, ValueError, TypeError, binascii.Error):
            raise LoraportError("INVALID_PAGE_TOKEN", subject="page_token") from None
        return key


def _context(scope: Sequence[str]) -> bytes:
    return canonical(list(scope))
