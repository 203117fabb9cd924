"""Names for cached key/value blocks, shared by the router and the executors.

A block's name commits to everything that shaped its contents: the base, the adapter revision, the tenant's
salt, every token before the block and the tokens in it. Two blocks with one name hold the same numbers, and a
name made for one revision or tenant can never be met by another: the chain starts from them.

Every input is length-prefixed and every use has its own domain tag, so no two different inputs are ever the same bytes
to the hash. The golden vector in `tests/unit/shared/test_prefix_hash.py` fixes the result; changing it changes the
contract between router and executor.
"""

import hashlib
import struct
from collections.abc import Sequence

_ROOT = b"loraport.prefix-hash.v1/root\x00"
_BLOCK = b"loraport.prefix-hash.v1/block\x00"
_NO_REVISION = b"\x00"
_WITH_REVISION = b"\x01"


def _field(data: bytes) -> bytes:
    return struct.pack(">Q", len(data)) + data


def tenant_salt(tenant: str) -> bytes:
    """Return the salt of a tenant's chains, also where the tenant uses an adapter that another one shares with it."""
    return tenant.encode()


def prefix_root(*, base_digest: str, revision_id: str | None, salt: bytes) -> bytes:
    """Return the 32-byte parent of a sequence's first block.

    `base_digest` and `revision_id` are full digests ("sha256:…"); None means the base alone. `salt` is the
    tenant's: two tenants never share a chain, not even over one base.
    """
    revision = _NO_REVISION if revision_id is None else _WITH_REVISION + _field(revision_id.encode())
    return hashlib.sha256(_ROOT + _field(base_digest.encode()) + revision + _field(salt)).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the 32-byte name of the block that holds `tokens` and follows `parent`.

    Raises:
        ValueError: `parent` is not 32 bytes, or a token is outside [0, 2**32).
    """
    if len(parent) != 32:
        raise ValueError(f"a parent hash has 32 bytes, not {len(parent)}")
    try:
        packed = struct.pack(f">{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ValueError("token ids are integers in [0, 2**32)") from error
    return hashlib.sha256(_BLOCK + parent + _field(packed)).digest()


def prefix_chain(
    tokens: Sequence[int], *, block_size: int, base_digest: str, revision_id: str | None, salt: bytes
) -> tuple[bytes, ...]:
    """Return the names of all full blocks of `tokens`, first block first; a partial last block has no name."""
    if block_size < 1:
        raise ValueError("a block holds at least one token")
    parent = prefix_root(base_digest=base_digest, revision_id=revision_id, salt=salt)
    names: list[bytes] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        names.append(parent)
    return tuple(names)
