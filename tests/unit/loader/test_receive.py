"""Receiving an upload's bytes: a client that only trickles them does not keep its place."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from services.loader import receive as receiving
from services.loader.lane import Lane
from services.loader.receive import MAX_CHUNK_BYTES, MIN_BYTES_PER_S, PATIENCE_S, ChunkPart, Part, paced, receive
from services.shared.clock import ManualClock, SystemClock
from services.shared.errors import LoraportError


async def trickle(closed: list[str]) -> AsyncGenerator[Part, None]:
    yield ChunkPart("config", b"{}")
    try:
        while True:
            yield ChunkPart("weights", b"x")
            await asyncio.sleep(0.02)
    finally:
        closed.append("closed")


async def test_an_upload_that_trickles_is_ended_though_it_is_never_idle(tmp_path: Path) -> None:
    closed: list[str] = []
    async with asyncio.timeout(60):
        with pytest.raises(LoraportError) as ended:
            await receive(
                trickle(closed), Lane("test", 1), weights_size=200_000, spool_dir=str(tmp_path), patience_s=0.1
            )
    assert ended.value.reason == "DEADLINE_EXCEEDED"
    assert "200000 bytes" in ended.value.message
    assert closed == ["closed"]
    assert list(tmp_path.iterdir()) == []


async def test_an_upload_that_ends_in_the_middle_of_a_write_is_closed_at_once(tmp_path: Path) -> None:
    lane, written, closed = Lane("test", 1), threading.Event(), list[str]()

    async def parts() -> AsyncGenerator[Part, None]:
        try:
            yield ChunkPart("config", b"{}")
            lane.run(written.wait)  # the write of what comes next waits behind it
            yield ChunkPart("weights", b"x")
        finally:
            closed.append("closed")

    try:
        with pytest.raises(LoraportError) as ended:
            await receive(parts(), lane, weights_size=1, spool_dir=str(tmp_path), patience_s=0.1)
        assert (ended.value.reason, closed) == ("DEADLINE_EXCEEDED", ["closed"])
    finally:
        written.set()
        lane.close()


async def test_bytes_that_come_in_time_are_taken(tmp_path: Path) -> None:
    async def parts() -> AsyncGenerator[Part, None]:
        yield ChunkPart("config", b"{}")
        for piece in (b"ab", b"c"):
            await asyncio.sleep(0.05)
            yield ChunkPart("weights", piece)

    received = await receive(parts(), Lane("test", 1), weights_size=3, spool_dir=str(tmp_path), patience_s=60)
    received.weights.seek(0)
    assert (received.config, received.weights.read()) == (b"{}", b"abc")
    received.weights.close()


async def sent(clock: ManualClock, pieces: list[tuple[float, int]], closed: list[str]) -> AsyncGenerator[Part, None]:
    """Sends so many bytes after so many seconds each."""
    try:
        for after, count in pieces:
            clock.advance(after)
            yield ChunkPart("weights", bytes(count))
    finally:
        closed.append("closed")


@pytest.mark.parametrize(
    ("pieces", "taken"),
    [
        ([(PATIENCE_S, 1), (0.0, 1)], 2),  # patience is for everybody
        ([(PATIENCE_S - 1, 1), (PATIENCE_S, 1), (1.0, 1)], 1),  # never idle for long, and far too slow
        ([(PATIENCE_S / 2, 1)] * 100, 2),
        ([(MAX_CHUNK_BYTES / MIN_BYTES_PER_S, MAX_CHUNK_BYTES)] * 30, 30),  # just the least rate, for ever
        ([(2 * MAX_CHUNK_BYTES / MIN_BYTES_PER_S, MAX_CHUNK_BYTES)] * 30, int(PATIENCE_S)),  # half of it
    ],
)
async def test_an_upload_brings_a_least_rate_all_the_while(pieces: list[tuple[float, int]], taken: int) -> None:
    clock, closed, came = ManualClock(), list[str](), 0
    reason = ""
    try:
        async for _ in paced(sent(clock, pieces, closed), clock):
            came += 1
            clock.advance(60.0)  # what the loader does meanwhile is not the client's
    except LoraportError as error:
        reason = error.reason
    assert (came, reason, closed) == (taken, "DEADLINE_EXCEEDED" if taken < len(pieces) else "", ["closed"])


async def test_an_upload_that_sends_nothing_more_is_ended_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "PATIENCE_S", 0.05)
    closed: list[str] = []

    async def silent() -> AsyncGenerator[Part, None]:
        try:
            yield ChunkPart("config", b"{}")
            await asyncio.Event().wait()
        finally:
            closed.append("closed")

    with pytest.raises(LoraportError) as ended:
        async for _ in paced(silent(), SystemClock()):
            pass
    assert (ended.value.reason, closed) == ("DEADLINE_EXCEEDED", ["closed"])
