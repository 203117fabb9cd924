"""Callers of a router, as a process of their own, for `bench.router`; they take little of a core.

`python -m bench.router_callers FOLDER PORT METHOD MODE ...` calls a Generate-like stream of messages that are neither
made nor read here: one request's bytes are sent as they are, answers are counted. Prints one line of JSON: what the
mode says, and the number of all calls.

    starts CALLERS SECONDS      that many callers, each asking again when it was answered: streams per second
    rate PER_SECOND SECONDS     calls begun at even gaps whatever became of the others: how long each took, in ms
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc

CHANNELS = 4


class Callers:
    """Streams over a few connections; `metadata` by number of the call."""

    def __init__(self, port: int, method: str, *, root: bytes, request: bytes, keys: list[str]) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        credentials = grpc.ssl_channel_credentials(root)
        self._channels = [
            grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) for _ in range(CHANNELS)
        ]
        self._streams = [channel.unary_stream(method) for channel in self._channels]
        self._request = request
        self.answered = 0
        self._metadata = [(("authorization", f"Bearer {key}"),) for key in keys]

    async def call(self, number: int) -> None:
        """Asks, and reads the answer to its end."""
        call = self._streams[number % CHANNELS](
            self._request, metadata=self._metadata[number % len(self._metadata)], timeout=60
        )
        while await call.read() is not grpc.aio.EOF:
            pass
        self.answered += 1

    async def starts(self, callers: int, seconds: float) -> float:
        """Returns the streams answered per second with always so many open."""
        done, started = 0, time.perf_counter()
        until = started + seconds

        async def one(number: int) -> None:
            nonlocal done
            while time.perf_counter() < until:
                await self.call(number)
                done += 1

        await asyncio.gather(*(one(number) for number in range(callers)))
        return done / (time.perf_counter() - started)

    async def rate(self, per_second: float, seconds: float) -> list[float]:
        """Returns how many ms each call took; one that failed took for ever."""
        took: list[float] = []
        start = time.perf_counter() + 0.2

        async def one(number: int) -> None:
            begun = time.perf_counter()
            try:
                await self.call(number)
                took.append((time.perf_counter() - begun) * 1000)
            except grpc.RpcError:
                took.append(float("inf"))

        tasks = []
        for number in range(int(per_second * seconds)):
            await asyncio.sleep(max(0.0, start + number / per_second - time.perf_counter()))
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)
        return took

    async def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            await channel.close()


async def run(arguments: list[str]) -> None:
    """Does what the command line says."""
    folder, port, method, mode, first, second = arguments
    callers = Callers(
        int(port), method, root=(Path(folder) / "ca.pem").read_bytes(),
        request=(Path(folder) / "request.bin").read_bytes(), keys=(Path(folder) / "keys.txt").read_text().split(),
    )  # fmt: skip
    await callers.starts(8, 1.0)
    if mode == "starts":
        found: Any = await callers.starts(int(first), float(second))
    else:
        found = await callers.rate(float(first), float(second))
    print(json.dumps([found, callers.answered]))
    await callers.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))
