"""The object store is somebody else's: however much it says, and however slowly, a loader gets away from it."""

import asyncio
import contextlib
import gzip
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from loraport.bundle.digest import sha256_digest
from loraport.loader.v1 import loader_service_pb2 as pb
from services.loader import service
from services.loader.answers import Bounds
from services.loader.bad_digests import BadDigests
from services.loader.conformance import SIZE_BYTES, _read
from services.loader.host_tier import HostTier
from services.loader.intake import Intake, IntakeLimits
from services.loader.lane import Lane
from services.loader.resolve import Resolved
from services.loader.shell import Granted, HostLoader
from services.loader.slots import Slots
from services.loader.store import S3Store, verified_key
from services.loader.turns import Turns
from services.shared.clock import SystemClock
from services.shared.errors import LoraportError
from tests.loader_rig import running
from tests.support.http_store import answering, http_server, respond

# Far more than the buffers between two sockets hold: a server that got rid of it all was listened to.
FLOOD_BYTES = 64 << 20
BLOCK = b"\n" * (64 << 10)
# Drips end, so that a client that waits for them fails its test and does not hang.
DRIPS, DRIP_S = 400, 0.02
HASTY = Bounds(patience_s=0.2, bytes_per_s=1000)
# For stores of which another answer is good: that one has time on a busy machine, too.
FAIR = Bounds(patience_s=3.0, bytes_per_s=1000)
PATIENT = Bounds(patience_s=600.0)


class Flood:
    """An answer that does not end: `head`, then `block` again and again. `ends` counts how, once for each request."""

    def __init__(self, head: str, block: bytes = BLOCK) -> None:
        self.head, self.block = head.replace("\n", "\r\n").encode(), block
        self.swallowed = 0
        self.ended = threading.Semaphore(0)

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        try:
            handler.wfile.write(self.head)
            block = self.block * (len(BLOCK) // len(self.block))
            for _ in range(FLOOD_BYTES // len(block)):
                handler.wfile.write(block)
            self.swallowed += 1
        except OSError:
            pass
        finally:
            self.ended.release()


XML = "Content-Type: application/xml\n\n"
CALLS: dict[str, Callable[[S3Store], Any]] = {
    "read": lambda store: list(store.read("verified", "x")),
    "put": lambda store: store.put("verified", "x", io.BytesIO(b"x"), 1),
    "delete": lambda store: store.delete("verified", "x"),
    "keys": lambda store: store.keys("quarantine", "x/"),
}


def reason(call: Callable[[S3Store], Any], store: S3Store) -> str:
    with pytest.raises(LoraportError) as caught:
        call(store)
    return caught.value.reason


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("head", "block"),
    [
        (f"HTTP/1.1 404 x\n{XML}", BLOCK),
        ("HTTP/1.1 500 x\nContent-Type: text/plain\n\n", BLOCK),
        (f"HTTP/1.1 503 x\nRetry-After: 0\n{XML}", BLOCK),
        (f"HTTP/1.1 302 x\nLocation: /y\n{XML}", BLOCK),
        (f"HTTP/1.1 301 x\nLocation: /y\n{XML}", BLOCK),
        ("", b"HTTP/1.1 100 Continue\r\n\r\n"),
        ("HTTP/1.1 200 x\nTransfer-Encoding: chunked\n\n0\n", b"a: b\r\n"),
    ],
    ids=["404", "500", "later", "302", "301", "continue", "trailers"],
)
def test_no_answer_is_listened_to_for_ever(call: str, head: str, block: bytes) -> None:
    flood = Flood(head, block)
    with http_server(flood) as (store, seen):
        assert reason(CALLS[call], store) == "STORE_UNAVAILABLE"
        for _ in seen:
            assert flood.ended.acquire(timeout=60)
    assert flood.swallowed == 0


@pytest.mark.parametrize("call", ["put", "delete", "keys"])
def test_no_success_is_listened_to_for_ever(call: str) -> None:
    flood = Flood(f"HTTP/1.1 200 x\n{XML}")
    with http_server(flood) as (store, _):
        assert reason(CALLS[call], store) == "STORE_UNAVAILABLE"
        assert flood.ended.acquire(timeout=60)
    assert flood.swallowed == 0


@pytest.mark.parametrize("call", CALLS)
def test_no_answer_is_inflated(call: str) -> None:
    said = b"<Error><Code>XMinioStorageFull</Code></Error>"
    for body, expected in ((said, "STORAGE_FULL"), (gzip.compress(said), "STORE_UNAVAILABLE")):
        encoding = {} if body is said else {"Content_Encoding": "gzip"}
        with http_server(
            lambda handler, body=body, encoding=encoding: respond(
                handler, 500, body, Content_Type="application/xml", **encoding
            )
        ) as (store, _):
            assert reason(CALLS[call], store) == expected


@pytest.mark.parametrize("call", ["put", "delete", "keys"])
def test_no_answer_defines_entities(call: str) -> None:
    bomb = b"""<!DOCTYPE a [<!ENTITY a "NoSuchKey">]><ListBucketResult><Name>&a;</Name></ListBucketResult>"""
    with http_server(lambda handler: respond(handler, 200, bomb, Content_Type="application/xml")) as (store, _):
        assert reason(CALLS[call], store) == "STORE_UNAVAILABLE"


def test_a_check_of_the_store_reads_no_more_than_it_wrote() -> None:
    flood = Flood("HTTP/1.1 200 x\n\n")
    with http_server(flood) as (store, _):
        assert len(_read(store, "x") or b"") > SIZE_BYTES
        assert flood.ended.acquire(timeout=60)
    assert flood.swallowed == 0


# Listings


class Pages:
    """A listing that is always continued, `size` keys a page; after 200 pages it ends after all."""

    def __init__(self, size: int, padding: int = 0) -> None:
        self.size, self.padding, self.pages = size, padding, 0

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        start = self.pages * self.size
        self.pages += 1
        rows = "".join(f"<Contents><Key>k{start + i}</Key></Contents>" for i in range(self.size))
        more = "true" if self.pages < 200 else "false"
        respond(
            handler,
            200,
            (
                '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>quarantine</Name>'
                f"<IsTruncated>{more}</IsTruncated><NextContinuationToken>t{self.pages}</NextContinuationToken>"
                f"{rows}{' ' * self.padding}</ListBucketResult>"
            ).encode(),
            Content_Type="application/xml",
        )


def test_a_listing_that_never_ends_is_left() -> None:
    listing = Pages(10)
    with http_server(listing, Bounds(keys=25, pages=5)) as (store, _):
        assert store.keys("quarantine", "") == [f"k{i}" for i in range(25)]
    assert listing.pages == 3


def test_pages_without_keys_are_bounded_as_well() -> None:
    listing = Pages(0)
    with http_server(listing, Bounds(keys=25, pages=5)) as (store, _):
        for turn in (1, 2):  # one listing does not use up another's pages
            assert reason(CALLS["keys"], store) == "STORE_UNAVAILABLE"
            assert listing.pages == 5 * turn


@pytest.mark.parametrize(("padding", "fits"), [(1_000_000, True), (3_000_000, False)])
def test_a_page_has_a_bound_of_its_own(padding: int, fits: bool) -> None:
    with http_server(Pages(10, padding), Bounds(keys=10)) as (store, _):
        if fits:
            assert len(store.keys("quarantine", "")) == 10
        else:
            assert reason(CALLS["keys"], store) == "STORE_UNAVAILABLE"


# Slowness


def drip(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    """Sends byte by byte, until the client has gone."""
    handler.close_connection = True
    with contextlib.suppress(OSError):
        for byte in data:
            handler.wfile.write(bytes([byte]))
            threading.Event().wait(DRIP_S)


def slow_body(handler: BaseHTTPRequestHandler, *, at_once: int = 0) -> None:
    with contextlib.suppress(OSError):
        handler.wfile.write(f"HTTP/1.1 200 x\r\nContent-Length: {at_once + DRIPS}\r\n\r\n".encode() + b"x" * at_once)
        drip(handler, b"x" * DRIPS)


def slow_head(handler: BaseHTTPRequestHandler) -> None:
    drip(handler, b"HTTP/1.1 200 x\r\nA: " + b"a" * DRIPS + b"\r\nContent-Length: 0\r\n\r\n")


def slow_chunk_line(handler: BaseHTTPRequestHandler) -> None:
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n")
        drip(handler, b"1;" + b"a" * DRIPS + b"\r\nx\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "answer",
    [slow_body, slow_head, slow_chunk_line, lambda handler: slow_body(handler, at_once=1 << 20)],
    ids=["body", "head", "chunk line", "body that came fast at first"],
)
def test_who_answers_too_slowly_is_left_and_not_asked_again(answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
    with http_server(answer, HASTY) as (store, seen):
        assert reason(CALLS["read"], store) == "STORE_UNAVAILABLE"
    assert len(seen) == 1


def test_a_reader_gets_what_is_there_before_more_comes() -> None:
    seen = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 x\r\nContent-Length: 20\r\n\r\n" + b"x" * 10)
            if seen.wait(60):
                handler.wfile.write(b"x" * 10)

    with (
        http_server(answer, Bounds(piece_s=0.0)) as (store, _),
        closing(store.read("verified", "x")) as pieces,
    ):
        first = next(pieces)
        seen.set()
        assert first + b"".join(pieces) == b"x" * 20


GOOD = b"good bytes"
GOOD_ID, SLOW_ID = "sha256:" + "0" * 64, "sha256:" + "1" * 64


class Played:
    """A registry and a resolver that say yes: the good revision has its digest, the slow one another."""

    async def resolve(self, revision_id: str) -> Resolved:
        if revision_id == GOOD_ID:
            return Resolved(revision_id, "acme", sha256_digest(GOOD), len(GOOD), b"", b"")
        return Resolved(revision_id, "globex", "sha256:" + "f" * 64, 1 << 20, b"", b"")

    async def require_fresh(self) -> None:
        return None

    async def item(self, revision_id: str) -> Any:
        return await self.resolve(revision_id)

    def is_active(self, revision_id: str) -> bool:
        return True

    def active_digest(self, digest: str) -> bool:
        return True

    def needed(self) -> frozenset[str]:
        return frozenset()


@contextlib.contextmanager
def one_slot(bounds: Bounds) -> Iterator[tuple[HostLoader, threading.Event, threading.Event]]:
    """A loader with one turn and one thread for loads, on a store that is good for one digest and drips another.

    The events say that the drip began, and that nobody listens to it any more. It never ends by itself.
    """
    began, left, over = threading.Event(), threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if verified_key(sha256_digest(GOOD)) in handler.path:
            respond(handler, 200, GOOD)
            return
        try:
            handler.wfile.write(b"HTTP/1.1 200 x\r\nContent-Length: 1048576\r\n\r\n")
            while not over.wait(DRIP_S):
                handler.wfile.write(b"x")
                began.set()
        except OSError:
            left.set()

    played: Any = Played()
    with http_server(answer, bounds) as (store, _):
        try:
            yield (
                HostLoader(
                    store=store,
                    registry=played,
                    resolver=played,
                    clock=SystemClock(),
                    tier=HostTier(4 << 20),
                    bad=BadDigests(0.0),
                    slots=Slots(1, per_key=1),
                    lane=Lane("load", 1),
                ),
                began,
                left,
            )
        finally:
            over.set()


async def load(loader: HostLoader, revision_id: str) -> Any:
    return [event async for event in loader.ensure(revision_id, holder="executor-0")][-1]


async def test_a_store_that_drips_holds_no_slot() -> None:
    with one_slot(FAIR) as (loader, _, left):
        async with asyncio.timeout(60):
            with pytest.raises(LoraportError) as caught:
                await load(loader, SLOW_ID)
            assert caught.value.reason == "STORE_UNAVAILABLE"
            assert isinstance(await load(loader, GOOD_ID), Granted)
        assert await asyncio.to_thread(left.wait, 60)
        await loader.close()


async def test_cancel_ends_a_load_that_drips() -> None:
    with one_slot(PATIENT) as (loader, began, left):
        slow = asyncio.create_task(load(loader, SLOW_ID))
        assert await asyncio.to_thread(began.wait, 60)
        assert await loader.cancel(SLOW_ID, holder="executor-0")
        with pytest.raises(LoraportError) as caught:
            await slow
        assert caught.value.reason == "LOAD_CANCELLED"
        async with asyncio.timeout(60):
            assert isinstance(await load(loader, GOOD_ID), Granted)
        assert await asyncio.to_thread(left.wait, 60)
        await loader.close()


async def test_a_loader_that_closes_leaves_a_store_that_drips() -> None:
    with one_slot(PATIENT) as (loader, began, left):
        slow = asyncio.create_task(load(loader, SLOW_ID))
        assert await asyncio.to_thread(began.wait, 60)
        await loader.close()
        assert await asyncio.to_thread(left.wait, 60)
        with pytest.raises(LoraportError):
            await slow


async def test_a_store_that_hangs_does_not_hold_up_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STORE_WAIT_S", 0.0)
    began, over = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        began.set()
        over.wait()

    with answering(answer) as (address, _):
        try:
            async with running(tmp_path, address, tmp_path) as rig:
                assert await asyncio.to_thread(began.wait, 60)
                assert (await rig.executor("executor-0").Inventory(pb.InventoryRequest(), timeout=60)).budget_bytes
        finally:
            over.set()


def test_a_sweep_ends_when_the_loader_does() -> None:
    swept: list[str] = []

    class Store:
        def keys(self, area: str, prefix: str) -> list[str]:
            return [f"{prefix}{number}" for number in range(3)]

        def delete(self, area: str, key: str) -> None:
            swept.append(key)
            asyncio.run(intake.close(0.0))

    nothing: Any = None
    intake = Intake(
        store=Store(),  # type: ignore[arg-type]
        registry=nothing,
        key=nothing,
        trusted=nothing,
        clock=SystemClock(),
        turns=Turns(Slots(1, per_key=1)),
        lane=Lane("upload", 1),
        limits=IntakeLimits(verifier="loader", max_weights_bytes=1, spool_dir=None),
    )
    assert intake.sweep() == 1
    assert swept == ["loader/0"]
