"""Sealed memory: nobody changes it, readers outlive it, and its absence is said."""

import os
import tempfile

import pytest

from loraport.bundle.digest import sha256_digest
from services.loader.sealed import CHUNK_BYTES, Blob


def content(size: int) -> bytes:
    return os.urandom(1024) * (size // 1024) + b"x" * (size % 1024)


def read(blob: Blob) -> list[bytes]:
    reader = blob.open_reader()
    pieces = list(iter(reader.next_piece, b""))
    reader.close()
    reader.close()
    return pieces


def test_bytes_are_kept_and_hashed_where_they_lie() -> None:
    data = content(2 * CHUNK_BYTES + 7)
    blob = Blob("test")
    for start in range(0, len(data), 100_000):
        blob.write(data[start : start + 100_000])
    blob.seal()
    assert blob.size_bytes == len(data)
    assert blob.digest() == sha256_digest(data)
    pieces = read(blob)
    assert b"".join(pieces) == data
    assert [len(piece) for piece in pieces] == [CHUNK_BYTES, CHUNK_BYTES, 7]
    blob.close()


@pytest.mark.parametrize("hashed_early", [(), (1,), (300_000, 250_000, 100)], ids=str)
def test_the_digest_is_of_the_bytes_that_lie_there(hashed_early: tuple[int, ...]) -> None:
    """Whatever was hashed early, and whoever changed what was not: it is the memory that is judged."""
    data = content(CHUNK_BYTES + 300_007)
    blob = Blob("test")
    blob.write(data[:300_000])
    for end in hashed_early:
        blob.hash_to(end)
    blob.write(data[300_000:])
    os.pwrite(blob._fd, b"?", len(data) - 5)
    assert blob.digest() == blob.digest() == sha256_digest(data[:-5] + b"?" + data[-4:])
    blob.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the platform has no memory files")
def test_a_sealed_blob_cannot_be_changed() -> None:
    blob = Blob("test")
    blob.write(b"abc")
    blob.seal()
    blob.seal()
    assert blob.unsealed_because == ""
    with pytest.raises(PermissionError):
        blob.write(b"d")
    with pytest.raises(PermissionError):
        os.pwrite(blob._fd, b"X", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(blob._fd, 1)
    assert read(blob) == [b"abc"]
    blob.close()


def test_a_reader_outlives_its_blob() -> None:
    blob = Blob("test")
    blob.write(b"abc")
    reader = blob.open_reader()
    blob.close()
    blob.close()
    # A new file may get the number of the closed descriptor; the reader has its own.
    with tempfile.TemporaryFile() as other:
        other.write(b"other")
        assert reader.next_piece() == b"abc"
    assert reader.next_piece() == b""
    reader.close()


def test_without_memory_files_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    blob = Blob("test")
    blob.write(b"abc")
    blob.seal()
    assert "no memory files" in blob.unsealed_because
    assert (blob.digest(), read(blob)) == (sha256_digest(b"abc"), [b"abc"])
    blob.close()
