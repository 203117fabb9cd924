"""API keys: `lk_<key id>_<secret>`, made once and kept only as a keyed hash."""

import hashlib
import hmac
import string
from dataclasses import dataclass

from services.registry.ports import Randomness

KEY_ID_ALPHABET = string.ascii_lowercase + string.digits
SECRET_ALPHABET = string.ascii_letters + string.digits
KEY_ID_LENGTH = 10
# 43 characters of 62 carry 256 bits.
SECRET_LENGTH = 43
SCOPES = ("generate", "list")


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """A key that was just made. `text` is shown to its owner once and never kept."""

    key_id: str
    text: str
    secret_hmac: bytes

    def __repr__(self) -> str:
        return f"NewApiKey({self.key_id})"


def make_api_key(randomness: Randomness, pepper: bytes) -> NewApiKey:
    """Returns a new key and its HMAC-SHA-256 under the fleet's pepper."""
    key_id = randomness.text(KEY_ID_ALPHABET, KEY_ID_LENGTH)
    text = f"lk_{key_id}_{randomness.text(SECRET_ALPHABET, SECRET_LENGTH)}"
    return NewApiKey(key_id, text, hmac.digest(pepper, text.encode("ascii"), hashlib.sha256))
