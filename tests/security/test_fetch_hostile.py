"""The transport of fetches against a server that lies and leads astray."""

import gzip
import itertools
import ssl
import threading

import pytest

from services.loader.fetch.faults import FetchFault
from services.loader.fetch.http import Budget
from services.loader.fetch.sources import Target
from tests.security.hostile import DATA, PUBLIC, QUICK, Request, Wire, World, code, remote


def test_a_good_file_comes_whole(world: World) -> None:
    assert world.fetch(size_bytes=len(DATA)) == DATA
    [request] = world.requests
    assert (request.host, request.path) == ("files.example", "/a")
    assert request.headers["accept-encoding"] == "identity"
    assert "authorization" not in request.headers
    assert world.connected == [(PUBLIC, 443)]


# Where it leads


def test_a_name_that_moves_between_check_and_use_leads_nowhere_else(world: World) -> None:
    """Rebinding: the name server gives a public address first, then our own machine."""
    world.names["files.example"] = [[PUBLIC], ["127.0.0.1"]]
    assert world.fetch(size_bytes=len(DATA)) == DATA
    assert world.resolved == ["files.example"]  # asked once
    assert world.connected == [(PUBLIC, 443)]
    assert code(world) == "ADDRESS"  # asked again by the next fetch, it is refused
    assert world.connected == [(PUBLIC, 443)]


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        [PUBLIC, "10.0.0.5"],
        ["::ffff:169.254.169.254"],
        ["64:ff9b::7f00:1"],
        ["fe80::1%lo"],
        ["fd00:ec2::254"],
    ],
    ids=str,
)
def test_one_address_that_is_not_public_condemns_the_name(world: World, addresses: list[str]) -> None:
    world.names["files.example"] = [addresses]
    assert code(world) == "ADDRESS"
    assert world.connected == []


def test_a_private_store_may_be_private_but_not_local(world: World) -> None:
    for address, outcome in (("10.1.2.3", ""), ("127.0.0.1", "ADDRESS"), ("169.254.169.254", "ADDRESS")):
        world.names["s3.example"] = [[address]]
        file = remote("s3.example", private=True)
        if outcome:
            assert code(world, file) == outcome
        else:
            assert world.fetch(file) == DATA


def test_a_private_store_that_redirects_leads_to_no_private_host(world: World) -> None:
    world.names = {"s3.example": [["10.1.2.3"]], "cdn.example": [["10.1.2.4"]]}
    world.script = redirecting("https://cdn.example/a")
    assert code(world, remote("s3.example", private=True)) == "ADDRESS"
    assert len(world.connected) == 1


def test_no_address_and_no_name_server(world: World) -> None:
    world.names["files.example"] = [[]]
    assert code(world) == "RESOLVE"
    stalled = threading.Event()
    transport = world.transport()
    transport._resolve = lambda host, port: [str(stalled.wait(60))]
    try:
        with pytest.raises(FetchFault, match="RESOLVE"):
            transport.open(Target("files.example", 443, "/"), {}, budget=Budget(1))
    finally:
        stalled.set()


def test_the_next_address_is_tried_when_one_is_dead(world: World) -> None:
    world.names["files.example"] = [["8.8.8.8", PUBLIC]]
    transport, dead = world.transport(), "8.8.8.8"

    def connect(address: str, port: int, timeout_s: float) -> object:
        if address == dead:
            raise ConnectionRefusedError
        return world.connect(address, port, timeout_s)

    transport._connect = connect
    with transport.open(Target("files.example", 443, "/"), {}, budget=Budget(60)) as answer:
        assert answer.head.status == 200
    assert world.connected == [(PUBLIC, 443)]


def test_a_host_must_prove_its_name(world: World) -> None:
    assert code(world, remote("stranger.example")) == "TLS"
    world.authorities, ours = ssl.create_default_context(), world.authorities
    assert code(world) == "TLS"
    world.authorities = ours
    assert world.requests == []  # nothing was said to a stranger


# Redirects


def redirecting(*locations: str) -> object:
    hops = iter(locations)

    def script(request: Request, wire: Wire) -> None:
        location = next(hops, None)
        if location is None:
            wire.file(DATA, ETag='"1"')
        else:
            wire.head(302, {"Location": location, "Content-Length": "0"})

    return script


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("https://169.254.169.254/latest/meta-data", "IP_LITERAL"),
        ("https://[::ffff:169.254.169.254]/", "IP_LITERAL"),
        ("http://files.example/a", "SCHEME"),
        ("file:///etc/passwd", "SCHEME"),
        ("//evil.example/a", "SCHEME"),
        ("https://evil.example/a", "HOST_NOT_ALLOWED"),
        ("https://files.example@evil.example/a", "USERINFO"),
        ("https://files.example:8443/a", "PORT"),
        ("https://evil.example\\@files.example/a", "CHARACTER"),
        ("b", "SCHEME"),
        ("", "SCHEME"),
        ("/" + "a" * 9000, "TOO_LONG"),
        ("/../a", "PATH"),
    ],
)
def test_redirects_are_checked_like_first_addresses(world: World, location: str, expected: str) -> None:
    world.script = redirecting(location)
    assert code(world) == expected
    assert len(world.connected) == 1


def test_a_redirect_to_an_allowed_name_of_a_metadata_address_is_refused(world: World) -> None:
    world.names["cdn.example"] = [["169.254.169.254"]]
    world.script = redirecting("https://cdn.example/a")
    assert code(world) == "ADDRESS"
    assert len(world.connected) == 1


def test_authorization_stays_at_home(world: World) -> None:
    """It is sent to the named host, also after a redirect within it, and to no other; nor ever again after one."""
    world.script = redirecting("/b", "https://cdn.example/c", "https://files.example/d")
    secret = {"Authorization": "Bearer very-secret"}
    assert world.fetch(credentials=lambda target: secret) == DATA
    seen = [(request.host, request.path, "authorization" in request.headers) for request in world.requests]
    assert seen == [
        ("files.example", "/a", True),
        ("files.example", "/b", True),
        ("cdn.example", "/c", False),
        ("files.example", "/d", False),
    ]


def test_only_so_many_redirects(world: World) -> None:
    world.script = redirecting(*["/b"] * 3)
    assert world.fetch() == DATA
    world.script = redirecting(*["/b"] * 4)
    assert code(world) == "REDIRECT"
    world.script = redirecting("/b")
    assert code(world, remote(redirect_hosts=None)) == "REDIRECT"


def test_a_redirect_with_a_body_without_end_is_not_read(world: World) -> None:
    hops = itertools.count()

    def script(request: Request, wire: Wire) -> None:
        if next(hops) == 0:
            wire.head(302, {"Location": "/b", "Content-Length": str(1 << 40), "Content-Encoding": "gzip"})
            wire.send(b"\0" * 65536)
        else:
            wire.file(DATA)

    world.script = script
    assert world.fetch() == DATA


# What comes


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate, gzip", "zstd", ""])
def test_encoded_bodies_are_refused_unread(world: World, encoding: str) -> None:
    bomb = gzip.compress(b"\0" * (1 << 20))
    world.script = lambda request, wire: wire.file(bomb, Content_Encoding=encoding)
    assert code(world) == "ENCODED"


def test_a_gzip_file_without_the_header_stays_as_it_is(world: World) -> None:
    bomb = gzip.compress(b"\0" * (1 << 20))
    world.script = lambda request, wire: wire.file(bomb, Content_Type="application/gzip")
    assert world.fetch() == bomb


def test_oversize_is_refused_by_what_is_announced(world: World) -> None:
    assert code(world, max_bytes=len(DATA) - 1) == "SIZE"
    assert code(world, size_bytes=len(DATA) + 1) == "SIZE"
    world.script = lambda request, wire: wire.file(b"")
    assert code(world) == "SIZE"


def test_more_than_announced_is_not_read(world: World) -> None:
    def script(request: Request, wire: Wire) -> None:
        wire.file(DATA)
        while True:  # until the other side hangs up
            wire.send(b"x" * 65536)

    world.script = script
    assert world.fetch() == DATA


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Transfer-Encoding": "chunked"},
        {"Transfer-Encoding": "chunked", "Content-Length": "5"},
        {"Content-Length": "-1"},
        {"Content-Length": "5, 5"},
        {"Content-Length": "0x5"},
        {"Content-Length": "٥"},
        {"Content-Length": "9" * 30},
    ],
    ids=str,
)
def test_a_body_without_a_certain_end_is_refused(world: World, headers: dict[str, str]) -> None:
    def script(request: Request, wire: Wire) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        wire.send(b"HTTP/1.1 200 OK\r\n" + lines.encode() + b"\r\n")
        while True:
            wire.send(b"5\r\nhello\r\n" * 1000)

    world.script = script
    assert code(world) == "LENGTH"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "HEADERS"),
        (b"HTTP/1.1 abc OK\r\n\r\n", "HEADERS"),
        (b"HTTP/9.9 200 OK\r\n\r\n", "HEADERS"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", "HEADERS"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000 + b"\r\n\r\n", "HEADERS"),
        (b"", "BROKEN"),
        (b"HTTP/1.1 204 No\r\n\r\n", "STATUS"),
        (b"HTTP/1.1 101 Up\r\n\r\n", "STATUS"),
        (b"HTTP/1.1 401 No\r\n\r\n", "DENIED"),
        (b"HTTP/1.1 404 No\r\n\r\n", "MISSING"),
        (b"HTTP/1.1 503 No\r\n\r\n", "BUSY"),
        (b"HTTP/1.1 302 No\r\n\r\n", "REDIRECT"),
        (b"HTTP/1.1 302 No\r\nLocation: /b\r\nLocation: /c\r\n\r\n", "REDIRECT"),
    ],
    ids=lambda value: value[:20].decode() if isinstance(value, bytes) else value,
)
def test_answers_that_are_no_file(world: World, raw: bytes, expected: str) -> None:
    world.script = lambda request, wire: wire.send(raw)
    assert code(world) == expected


def test_an_answer_without_end_of_interim_answers_runs_out_of_time(world: World) -> None:
    def script(request: Request, wire: Wire) -> None:
        while True:
            wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    world.script = script
    assert code(world, limits=QUICK) == "SLOW"
