"""What the loader relies on in an object store, tried on the one that is configured."""

import io
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager

from services.loader.ports import ObjectMissing, ObjectStore
from services.shared.checks import Finding
from services.shared.errors import LoraportError

# Above the size of one part, so that an upload in parts is tried as well, would take long on a slow line.
SIZE_BYTES = 64 << 10
ADVICE = "see the store's log; its server must keep what it takes, byte for byte"


def check_store(store: ObjectStore, prefix: str) -> Finding:
    """Writes, reads, replaces, lists and removes an object under `prefix` in quarantine. Blocking; cleans up."""
    key = f"{prefix}/check-{secrets.token_hex(8)}"
    first, second = secrets.token_bytes(SIZE_BYTES), secrets.token_bytes(SIZE_BYTES // 2)
    try:
        with _removed(store, key):
            for data in (first, second):
                store.put("quarantine", key, io.BytesIO(data), len(data))
                if _read(store, key) != data:
                    return Finding("BAD", "an object that was written is read as another one", ADVICE)
            if key not in store.keys("quarantine", f"{prefix}/"):
                return Finding("BAD", "an object that was written is not listed", ADVICE)
        if _read(store, key) is not None:
            return Finding("BAD", "an object that was removed is still there", ADVICE)
    except LoraportError as error:
        return Finding("BAD", f"{error.reason}: {error.message}", "see whether the object store serves, and its log")
    return Finding("GOOD", "writes, reads, replaces, lists and removes")


def _read(store: ObjectStore, key: str) -> bytes | None:
    try:
        with closing(store.read("quarantine", key)) as pieces:
            data = b""
            for piece in pieces:
                data += piece
                if len(data) > SIZE_BYTES:  # more than was ever written
                    break
            return data
    except ObjectMissing:
        return None


@contextmanager
def _removed(store: ObjectStore, key: str) -> Iterator[None]:
    try:
        yield
    finally:
        store.delete("quarantine", key)
