"""Content digests in their one written form: "sha256:" and 64 lower-case hexadecimal digits.

A digest is never truncated and never written another way, so two digests are equal exactly when
their strings are.
"""

import hashlib
import re

PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def sha256_digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the digest of `data` in the written form."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def is_digest(value: object) -> bool:
    """Says whether `value` is a string in the written form."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def parse_digest(value: str) -> str:
    """Returns the 64 hexadecimal digits of a digest.

    Raises:
        ValueError: `value` is not in the written form.
    """
    if not is_digest(value):
        raise ValueError(f"not a digest of the form sha256:<64 hex>: {value!r:.80}")
    return value[len(PREFIX) :]
