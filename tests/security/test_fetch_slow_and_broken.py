"""Fetches from a server that stalls, breaks off and goes on with something else."""

import threading
import time
from dataclasses import replace

import pytest

from services.loader.fetch.faults import FetchFault
from tests.security.hostile import DATA, PATIENT, QUICK, Request, Wire, World, code, remote

# How slowly


def test_a_head_that_drips_is_given_up(world: World) -> None:
    world.script = lambda request, wire: wire.drip(b"HTTP/1.1 200 OK\r\nA: " + b"b" * 10_000, 0.02)
    assert code(world, limits=QUICK) == "SLOW"


def test_silence_is_given_up(world: World) -> None:
    released = threading.Event()
    world.script = lambda request, wire: released.wait(60)
    assert code(world, limits=QUICK) == "SLOW"
    released.set()


def test_a_body_that_drips_is_given_up(world: World) -> None:
    def script(request: Request, wire: Wire) -> None:
        wire.head(200, {"Content-Length": "100000"})
        wire.drip(b"x" * 100_000, 0.01)

    world.script = script
    with pytest.raises(FetchFault) as caught:
        world.fetch(limits=replace(QUICK, head_s=60))
    # By its pace, long before the time for the whole fetch is over.
    assert (caught.value.code, "whole fetch" in caught.value.detail) == ("SLOW", False)
    assert len(world.requests) == 1  # too slow is no reason to ask again


def test_the_whole_time_is_bounded_however_often_it_breaks(world: World) -> None:
    download = world.download(limits=replace(PATIENT, resume_pause_s=60))

    def script(request: Request, wire: Wire) -> None:
        download._budget._until = download._budget.now() + 0.2  # the way here may have taken longer
        wire.head(503)

    world.script = script
    with pytest.raises(FetchFault, match="SLOW"):
        download.next_piece()


def test_closing_ends_a_fetch_that_waits(world: World) -> None:
    released = threading.Event()

    def script(request: Request, wire: Wire) -> None:
        wire.head(200, {"Content-Length": "100000"})
        released.wait(60)

    world.script = script
    download = world.download()
    failures: list[str] = []

    def read() -> None:
        try:
            download.next_piece()
        except FetchFault as fault:
            failures.append(fault.code)

    reader = threading.Thread(target=read)
    reader.start()
    while not world.requests:
        time.sleep(0.01)
    download.close()
    reader.join(60)
    released.set()
    assert failures == ["STOPPED"]


# Broken and resumed


def parts(*scripts: object) -> object:
    """Runs one script per request."""
    rest = iter(scripts)

    def script(request: Request, wire: Wire) -> None:
        next(rest)(request, wire)

    return script


def half(etag: str | None = '"1"', data: bytes = DATA) -> object:
    """Announces the whole and sends half."""

    def script(request: Request, wire: Wire) -> None:
        wire.head(200, {"Content-Length": str(len(data)), **({"ETag": etag} if etag else {})})
        wire.send(data[: len(data) // 2])

    return script


def ranged(*, etag: str = '"1"', content_range: str = "", shift: int = 0, status: int = 206) -> object:
    """Answers what is missing, or something a little different."""

    def script(request: Request, wire: Wire) -> None:
        start = int(request.headers["range"].removeprefix("bytes=").removesuffix("-")) + shift
        rest = DATA[start:]
        stated = content_range or f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"
        wire.file(rest, status=status, ETag=etag, Content_Range=stated)

    return script


def test_a_short_body_is_resumed_where_it_broke(world: World) -> None:
    world.script = parts(half(), ranged())
    assert world.fetch(size_bytes=len(DATA)) == DATA
    assert world.requests[1].headers["range"].startswith("bytes=")
    assert world.requests[1].headers["if-range"] == '"1"'


def test_a_body_that_stays_short_is_given_up(world: World) -> None:
    world.script = half()
    assert code(world) in ("SHORT", "RANGE")
    world.script = half(etag=None)
    assert code(world) == "SHORT"
    assert sum(request.headers.get("range") is None for request in world.requests) >= PATIENT.max_resumes + 1


@pytest.mark.parametrize("etag", ['"1"', None, 'W/"1"', "unquoted"])
def test_a_whole_body_instead_of_a_range_must_repeat_what_is_here(world: World, etag: str | None) -> None:
    """200 to a Range, or no ETag to ask by: it starts again, and the first half must be the same."""
    world.script = parts(half(etag), lambda request, wire: wire.file(DATA, ETag='"2"'))
    assert world.fetch(size_bytes=len(DATA)) == DATA
    assert ("range" in world.requests[1].headers) == (etag == '"1"')


def test_a_whole_body_that_differs_in_what_is_here_is_refused(world: World) -> None:
    other = b"\1" + DATA[1:]
    world.script = parts(half(), lambda request, wire: wire.file(other, ETag='"2"'))
    assert code(world) == "CHANGED"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"etag": '"2"'}, "CHANGED"),
        ({"etag": 'W/"1"'}, "CHANGED"),
        ({"content_range": f"bytes 1-{len(DATA) - 1}/{len(DATA)}"}, "RANGE"),
        ({"content_range": "bytes */100"}, "RANGE"),
        ({"content_range": f"bytes 51200-{len(DATA) - 1}/*"}, "RANGE"),
        ({"content_range": f"bytes 51200-{len(DATA)}/{len(DATA) + 1}"}, "CHANGED"),
        ({"content_range": "nonsense"}, "RANGE"),
        ({"shift": -1}, "RANGE"),
        ({"shift": 1}, "RANGE"),
        ({"status": 416}, "RANGE"),
    ],
    ids=str,
)
def test_a_wrong_rest_is_refused(world: World, options: dict[str, object], expected: str) -> None:
    world.script = parts(half(), ranged(**options))
    assert code(world, size_bytes=len(DATA)) == expected


def test_a_part_that_nobody_asked_for_is_refused(world: World) -> None:
    world.script = lambda request, wire: wire.file(DATA, status=206, Content_Range="bytes 0-1/2")
    assert code(world) == "RANGE"


# Hubs


def test_the_commit_must_be_the_pinned_one(world: World) -> None:
    commit = "a" * 40
    for stated in ({}, {"X-Repo-Commit": "b" * 40}, {"X-Repo-Commit": "main"}):
        world.script = lambda request, wire, stated=stated: wire.file(DATA, **stated)
        assert code(world, remote("hub.example", commit=commit)) == "WRONG_COMMIT"

        world.script = lambda request, wire, stated=stated: wire.head(302, {"Location": "/b", **stated})
        assert code(world, remote("hub.example", commit=commit)) == "WRONG_COMMIT"
    assert len(world.requests) == 6


def test_the_hub_states_the_commit_and_another_host_has_the_bytes(world: World) -> None:
    commit = "a" * 40

    def script(request: Request, wire: Wire) -> None:
        if request.host == "hub.example":
            wire.head(302, {"Location": "https://cdn.example/blob?sig=1", "X-Repo-Commit": commit})
        else:
            wire.file(DATA)

    world.script = script
    assert world.fetch(remote("hub.example", commit=commit)) == DATA
    assert [request.host for request in world.requests] == ["hub.example", "cdn.example"]
