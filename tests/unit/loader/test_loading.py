"""Filling memory: a second thread hashes what lies there, and is gone whenever the load goes on or ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loraport.bundle.digest import sha256_digest
from services.loader import loading
from services.loader.loading import Load, SpoiledCopy, _fill
from services.loader.sealed import Blob
from services.loader.stages import LoadLife
from services.shared.errors import LoraportError

PIECES = [bytes([number]) * 1000 for number in range(8)]
DATA = b"".join(PIECES)


def load(size_bytes: int = len(DATA)) -> Load:
    return Load(sha256_digest(DATA), size_bytes, "token", LoadLife(cause="test"), frozenset({"acme"}))


def hashers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("loraport-hash")}


@pytest.fixture
def others() -> set[threading.Thread]:
    """What other tests of this process have left."""
    return hashers()


def test_whatever_comes_is_hashed_by_the_time_it_is_there(others: set[threading.Thread]) -> None:
    filled = load()
    _fill(filled, iter(PIECES))
    assert filled.blob is not None
    assert (filled.blob._hashed, filled.blob.digest()) == (len(DATA), filled.digest)
    assert hashers() <= others
    filled.discard()


def test_what_fails_in_the_second_thread_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Blob, end: int) -> None:
        raise OSError("broken")

    filled = load()
    with monkeypatch.context() as patch:
        patch.setattr(Blob, "hash_to", broken)
        _fill(filled, iter(PIECES))
        assert filled.blob is not None
        with pytest.raises(OSError, match="broken"):
            filled.blob.digest()
    assert filled.blob.digest() == filled.digest
    filled.discard()


@pytest.mark.parametrize("end", ["stop", "more", "error"])
def test_a_load_that_ends_leaves_no_work_behind(
    monkeypatch: pytest.MonkeyPatch, others: set[threading.Thread], end: str
) -> None:
    ended = load(len(DATA) - (end == "more"))
    busy, go, calls = threading.Event(), threading.Event(), []

    def slow(self: Blob, end: int) -> None:
        calls.append(end)
        busy.set()
        go.wait(60)

    class Hasher(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            go.set()  # the second thread goes on once what waited for it is dropped, or is not
            super().shutdown(wait=wait)

    def pieces() -> Iterator[bytes]:
        yield from PIECES[:-1]
        busy.wait(60)
        if end == "stop":
            ended.stop.set()
        if end == "error":
            raise LoraportError("STORE_UNAVAILABLE")
        yield PIECES[-1]

    monkeypatch.setattr(Blob, "hash_to", slow)
    monkeypatch.setattr(loading, "ThreadPoolExecutor", Hasher)
    with pytest.raises((LoraportError, SpoiledCopy)):
        _fill(ended, pieces())
    assert calls == [1000], "what waited to be hashed is dropped"
    assert hashers() <= others
    ended.discard()
