"""Three routers share a tenant's quotas over a real Valkey; without it each keeps to its part."""

import asyncio
import subprocess
import time
from collections.abc import Iterator

import pytest
import valkey

from loraport.dev.commands import valkey_program
from services.router import quota_board
from services.router.quota import Quotas, Use
from services.router.quota_board import KEY, QuotaBoard, decode, encode
from services.shared.errors import LoraportError
from services.shared.quotas import Quota
from tests.support.ports import free_port


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board that is there answers in the end; one that is gone is refused at once."""
    monkeypatch.setattr(quota_board, "TIMEOUT_S", 60.0)


@pytest.fixture
def server() -> Iterator[tuple[str, subprocess.Popen]]:
    port = free_port()
    command = [str(valkey_program()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = valkey.Valkey(port=port)
    ends = time.monotonic() + 60
    while True:
        try:
            client.ping()
            break
        except valkey.ConnectionError:
            assert time.monotonic() < ends
            time.sleep(0.02)
    client.close()
    yield f"redis://127.0.0.1:{port}", process
    process.terminate()
    process.wait(60)


def admitted(quotas: Quotas, quota: Quota) -> bool:
    try:
        quotas.enter("acme", quota)
    except LoraportError:
        return False
    return True


async def test_what_one_lets_in_the_others_do_not(server: tuple[str, subprocess.Popen]) -> None:
    url, process = server
    clock, quota = Time(), Quota(requests_per_minute=9, in_flight_count=100)
    routers = [Quotas(clock) for _ in range(3)]
    boards = [
        QuotaBoard(url, router, quota_of=lambda tenant: quota, router=f"r{number}", now=clock)
        for number, router in enumerate(routers)
    ]

    async def exchange() -> None:
        for _ in range(2):
            for board in boards:
                await board.exchange()

    await exchange()
    assert [router.routers for router in routers] == [3, 3, 3]
    count = 0
    for number in range(30):
        count += admitted(routers[number % 3], quota)
        await exchange()
    assert count == 9
    used = [{line.quota: line.used for line in router.lines("acme", quota)} for router in routers]
    assert [row["requests_per_minute"] for row in used] == [9, 9, 9]
    assert [row["in_flight_count"] for row in used] == [9, 9, 9]

    # A minute later, without the board: three each, and nine together.
    process.terminate()
    process.wait(60)
    clock.now += 60
    await exchange()
    assert not any(router.linked for router in routers)
    assert [sum(admitted(router, quota) for _ in range(9)) for router in routers] == [3, 3, 3]


async def test_words_that_are_none_and_routers_that_are_gone(server: tuple[str, subprocess.Popen]) -> None:
    url, _ = server
    clock = Time()
    quotas = Quotas(clock)
    board = QuotaBoard(url, quotas, quota_of=lambda tenant: Quota(), router="me", now=clock)
    client = valkey.asyncio.Valkey.from_url(url)
    good = {"acme": Use((1, 2, 3), 4, 5)}
    assert decode(encode(good, 7)) == (7, good)
    bad = [b"", b"{}", b"[]", b'{"sequence":1,"tenants":{"a":[1,2,3,4]}}', b'{"sequence":1,"tenants":{"a":[1,2,3,4,-5]}}',
           b'{"sequence":"1","tenants":{}}', b'{"sequence":1,"tenants":[]}', b'{"sequence":1,"tenants":{"a":[1,2,3,4,true]}}']  # fmt: skip
    for number, word in enumerate(bad):
        assert decode(word) is None
        await client.hset(KEY, f"bad{number}", word)
    await client.hset(KEY, "other", encode(good, 1))
    await board.exchange()
    assert quotas.routers == 2
    assert quotas.lines("acme", Quota())[3].used == 4
    # It says the same for too long: nothing of it is in flight any more, and its word is taken away.
    clock.now += quota_board.SILENT_S
    await board.exchange()
    assert (quotas.routers, quotas.lines("acme", Quota())[3].used) == (1, 0)
    await client.hset(KEY, "other", encode(good, 2))
    await board.exchange()
    assert quotas.routers == 2
    clock.now += quota_board.FORGET_S
    await board.exchange()
    assert await client.hkeys(KEY) == [b"me"]
    board.start()
    await asyncio.sleep(0)
    await board.stop()
    assert await client.hkeys(KEY) == []
    await client.aclose()
