"""Receiving an upload's bytes: a client that only trickles them does not keep its place."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.loader.lane import Lane
from services.loader.receive import ChunkPart, Part, receive
from services.shared.errors import LoraportError


async def trickle(closed: list[str]) -> AsyncIterator[Part]:
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
    assert closed
    assert list(tmp_path.iterdir()) == []


async def test_bytes_that_come_in_time_are_taken(tmp_path: Path) -> None:
    async def parts() -> AsyncIterator[Part]:
        yield ChunkPart("config", b"{}")
        for piece in (b"ab", b"c"):
            await asyncio.sleep(0.05)
            yield ChunkPart("weights", piece)

    received = await receive(parts(), Lane("test", 1), weights_size=3, spool_dir=str(tmp_path), patience_s=10)
    received.weights.seek(0)
    assert (received.config, received.weights.read()) == (b"{}", b"abc")
    received.weights.close()
