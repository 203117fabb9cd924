"""One load of weights into memory, and the blocking work of its stages."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import BinaryIO

import structlog

from services.loader.disk_cache import DiskCache
from services.loader.ports import ObjectMissing, ObjectStore
from services.loader.sealed import CHUNK_BYTES, Blob, Reader
from services.loader.stages import LoadLife
from services.loader.store import verified_key
from services.shared.errors import LoraportError

log = structlog.get_logger()


class SpoiledCopy(Exception):
    """The bytes from the node's disk are not the signed ones; the store may have them."""


@dataclass(slots=True)
class Load:
    """A load under way, for the tenants that asked for it so far. `begun` says that a turn of one of them runs it.

    `tier` is where its bytes came from; `spoiled` says that the disk's were wrong.
    """

    digest: str
    size_bytes: int
    token: str
    life: LoadLife
    tenants: frozenset[str] = frozenset()
    begun: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    blob: Blob | None = None
    tier: str = ""
    spoiled: bool = False
    error: LoraportError | None = None

    def tell(self) -> None:
        """Wakes everybody who follows the load."""
        self.changed.set()
        self.changed = asyncio.Event()

    def discard(self) -> None:
        """Gives the memory back. Idempotent."""
        if self.blob is not None:
            self.blob.close()
            self.blob = None


def fetch(load: Load, store: ObjectStore, disk: DiskCache | None) -> None:
    """Reads the bytes into memory: from the node's disk when it has them, else from the store.

    Raises:
        LoraportError: DIGEST_MISMATCH when the store has another number of bytes, what the store raises, or
            LOAD_CANCELLED.
    """
    if disk is not None and not load.spoiled:
        file = disk.open_file(load.digest, load.size_bytes, tenants=load.tenants)
        if file is not None:
            try:
                with file:
                    _fill(load, _pieces(file))
                load.tier = "DISK"
                return
            except SpoiledCopy as error:
                disk.spoil(load.digest, f"has {error}")
    load.tier = "STORE"
    try:
        with closing(store.read("verified", verified_key(load.digest))) as pieces:
            _fill(load, pieces)
    except ObjectMissing:
        raise LoraportError("DIGEST_MISMATCH", "the store has no object of this digest") from None
    except SpoiledCopy as error:
        raise LoraportError("DIGEST_MISMATCH", f"the store has {error}") from None


def verify(load: Load, disk: DiskCache | None) -> None:
    """Compares the digest of the bytes as they lie with the signed one.

    Raises:
        LoraportError: DIGEST_MISMATCH.
        SpoiledCopy: other bytes than were signed, from the disk; they are deleted there.
    """
    assert load.blob is not None
    found = load.blob.digest()
    if found == load.digest:
        return
    if load.tier == "DISK" and disk is not None:
        load.spoiled = True
        disk.spoil(load.digest, f"has the digest {found}")
        raise SpoiledCopy
    raise LoraportError("DIGEST_MISMATCH", f"the stored bytes have the digest {found}")


def seal(load: Load) -> None:
    """Makes the bytes final."""
    assert load.blob is not None
    load.blob.seal()
    if load.blob.unsealed_because:
        log.warning("host bytes are not sealed", why=load.blob.unsealed_because)


def keep(disk: DiskCache, digest: str, tenants: frozenset[str], reader: Reader, stop: threading.Event) -> bool:
    """Writes sealed bytes to the node's disk and closes the reader; returns whether they were written."""

    def pieces() -> Iterator[bytes]:
        while not stop.is_set() and (piece := reader.next_piece()):
            yield piece

    try:
        return disk.put(digest, reader.size_bytes, pieces(), tenants=tenants)
    finally:
        reader.close()


def _fill(load: Load, pieces: Iterator[bytes]) -> None:
    """Fills a fresh blob with exactly the load's number of bytes, and not one more."""
    load.discard()
    blob = load.blob = Blob("loraport-weights")
    # A second thread hashes what lies there while this one receives; it ends with this block, within one piece.
    with ThreadPoolExecutor(1, "loraport-hash") as hasher:
        try:
            for piece in pieces:
                if load.stop.is_set():
                    raise LoraportError("LOAD_CANCELLED")
                if blob.size_bytes + len(piece) > load.size_bytes:
                    raise SpoiledCopy(f"more than {load.size_bytes} bytes")
                blob.write(piece)
                hasher.submit(blob.hash_to, blob.size_bytes)  # a fault there is met again by `digest`
        except BaseException:
            hasher.shutdown(cancel_futures=True)
            raise
    if blob.size_bytes != load.size_bytes:
        raise SpoiledCopy(f"{blob.size_bytes} of {load.size_bytes} bytes")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while True:
        try:
            piece = file.read(CHUNK_BYTES)
        except OSError as error:
            raise SpoiledCopy(f"bytes that cannot be read ({error.strerror})") from None
        if not piece:
            return
        yield piece
