"""What bringing an adapter to memory costs: `make bench-cold-load`.

A real S3 server on loopback, the loader's own store client, host tier, disk tier and hand-over socket; only the
registry is played. Baselines are measured between the loads, in the same run: the same bytes read from the same place
and hashed, with nothing kept; for the hand-over, one copy of the bytes. Exits 0 unless something cannot be measured.
"""

import argparse
import asyncio
import contextlib
import hashlib
import io
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import structlog

from bench.figures import RESULTS, Figure, report
from loraport.bundle.digest import sha256_digest
from loraport.dev.commands import S3_OPTIONS, rclone_program
from services.executor.handover import take_over
from services.loader.bad_digests import BadDigests
from services.loader.disk_cache import DiskCache
from services.loader.handover import HandoverSocket
from services.loader.host_tier import HostTier
from services.loader.lane import Lane
from services.loader.ports import Area
from services.loader.resolve import Resolved
from services.loader.shell import Granted, HostLoader
from services.loader.slots import Slots
from services.loader.store import CHUNK_BYTES, S3Store, verified_key
from services.shared.clock import SystemClock
from services.shared.errors import LoraportError

HOST = "127.0.0.1"
KEYS = ("loraport-bench", "a-secret-of-some-length")
FACTOR = 2.5
HANDOVER_MS = 5.0
HANDOVERS = 25
CALLERS = 50
START_S = 60.0
REVISION = "sha256:" + "0" * 64


class CountingStore(S3Store):
    """The loader's store; counts what is read from it."""

    reads = 0

    def read(self, area: Area, key: str) -> Generator[bytes, None, None]:
        self.reads += 1
        return super().read(area, key)


class Played:
    """A registry and a resolver that say yes at once: they are not what is measured."""

    def __init__(self, digest: str, size_bytes: int) -> None:
        self._resolved = Resolved(REVISION, "bench", digest, size_bytes, b"", b"")

    async def resolve(self, revision_id: str) -> Resolved:
        return self._resolved

    async def require_fresh(self) -> None:
        return None

    def is_active(self, revision_id: str) -> bool:
        return True

    def active_digest(self, digest: str) -> bool:
        return True

    def needed(self) -> frozenset[str]:
        return frozenset()


class Bench:
    """A loader around `data`, and the ways to measure it. Times in milliseconds."""

    def __init__(self, store: CountingStore, data: bytes, folder: Path, rounds: int) -> None:
        self.store, self.data, self.rounds, self.folder = store, data, rounds, folder
        self.digest = sha256_digest(data)
        self.played: Any = Played(self.digest, len(data))
        self.disk_file = folder / "disk" / verified_key(self.digest)

    def loader(self, *, disk: DiskCache | None = None) -> HostLoader:
        return HostLoader(
            store=self.store,
            registry=self.played,
            resolver=self.played,
            clock=SystemClock(),
            tier=HostTier(len(self.data) + 1),
            bad=BadDigests(0.0),
            slots=Slots(4, per_key=4),
            lane=Lane("load", 5),
            disk=disk,
            hands_over=True,
        )

    async def cold(self, disk: DiskCache | None) -> tuple[float, tuple[str, ...]]:
        """Loads from cold; returns the time and where the bytes came from."""
        host = self.loader(disk=disk)
        started = time.perf_counter()
        events = [event async for event in host.ensure(REVISION, holder="bench")]
        elapsed = (time.perf_counter() - started) * 1000
        assert isinstance(events[-1], Granted)
        while disk is not None and not self.disk_file.exists():  # the copy is made behind the load's back
            await asyncio.sleep(0.01)
        await host.close()
        return elapsed, tuple(event.tier for event in events if not isinstance(event, Granted) and event.tier)

    def hash_store(self) -> None:
        with closing(self.store.read("verified", verified_key(self.digest))) as pieces:
            self._hash(pieces)

    def read_store(self) -> None:
        with closing(self.store.read("verified", verified_key(self.digest))) as pieces:
            for _ in pieces:
                pass

    def hash_disk(self) -> None:
        with self.disk_file.open("rb", buffering=0) as file:
            self._hash(iter(lambda: file.read(CHUNK_BYTES), b""))

    def _hash(self, pieces: Iterator[bytes]) -> None:
        found = hashlib.sha256()
        for piece in pieces:
            found.update(piece)
        assert found.hexdigest() == self.digest[7:], "the baseline read other bytes"

    async def cold_and_baseline(self, disk: DiskCache | None, *baselines: Callable[[], None], tier: str) -> list[float]:
        """Returns the medians of a cold load and of each baseline, taken in turns; the first round only warms up."""
        times: list[list[float]] = [[] for _ in range(len(baselines) + 1)]
        for _ in range(self.rounds + 1):
            elapsed, tiers = await self.cold(disk)
            assert tiers == (tier,), f"the bytes came from {tiers}"
            for kept, took in zip(times, [elapsed, *map(_timed, baselines)], strict=True):
                kept.append(took)
        return [statistics.median(kept[1:]) for kept in times]

    async def handovers(self) -> tuple[float, float]:
        """Returns the medians of (a lease on warm memory, handed over and mapped) and of one copy of the bytes."""
        host = self.loader()
        path = str(self.folder / "s")
        served = HandoverSocket(path, host.hand_over)
        served.start()
        times, copies = [], []
        for _ in range(HANDOVERS + 1):  # the first one loads
            started = time.perf_counter()
            [granted] = [e async for e in host.ensure(REVISION, holder="bench") if isinstance(e, Granted)]
            view = await asyncio.to_thread(take_over, path, granted.token, granted.lease_id, size_bytes=len(self.data))
            times.append((time.perf_counter() - started) * 1000)
            assert view[-1] == self.data[-1]
            host.release(granted.lease_id, holder="bench")
        assert sha256_digest(view) == self.digest
        for _ in range(self.rounds):
            copies.append(_timed(lambda: bytearray(view)))
        await served.stop()
        await host.close()
        return statistics.median(times[1:]), statistics.median(copies)

    async def reads_of_many(self) -> int:
        """Returns how often the store is read when many ask for one digest at once."""
        host, before = self.loader(), self.store.reads

        async def ask(number: int) -> None:
            async for _ in host.ensure(REVISION, holder=f"bench-{number}"):
                pass

        await asyncio.gather(*map(ask, range(CALLERS)))
        await host.close()
        return self.store.reads - before


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[CountingStore]:
    """Runs an S3 server over a folder and yields a store on it."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        address = f"{HOST}:{probe.getsockname()[1]}"
    command = [str(rclone_program()), "serve", "s3", str(folder), "--addr", address, *S3_OPTIONS]
    environment = {**os.environ, "RCLONE_AUTH_KEY": f'"{",".join(KEYS)}"'}
    folder.mkdir()
    server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        store = CountingStore(address, KEYS, quarantine_bucket="quarantine", verified_bucket="verified")
        deadline = time.monotonic() + START_S
        while True:
            try:
                store.prepare()
                break
            except LoraportError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.05)
        yield store
    finally:
        server.terminate()
        server.wait(60)


async def measure(bench: Bench) -> tuple[list[Figure], dict[str, Any]]:
    """Returns the figures and what else is worth knowing."""
    disk = DiskCache(bench.folder / "disk", 4 * len(bench.data))
    disk.open()
    await bench.cold(disk)  # the file that is read beside the store, too
    store_ms, store_plain, received, file_plain = await bench.cold_and_baseline(
        None, bench.hash_store, bench.read_store, bench.hash_disk, tier="STORE"
    )
    disk_ms, disk_plain = await bench.cold_and_baseline(disk, bench.hash_disk, tier="DISK")
    handed_ms, copy_ms = await bench.handovers()
    reads = await bench.reads_of_many()
    ms = {"unit": "ms"}
    figures = [
        Figure(name="cold_load_store", value=store_ms, baseline=store_plain, target=FACTOR * store_plain, **ms),
        # The store's own work, the network's and the copies to memory included: a file needs none of that.
        Figure(name="cold_load_store_by_file", value=store_ms, baseline=file_plain, target=FACTOR * file_plain, **ms),
        Figure(name="cold_load_disk", value=disk_ms, baseline=disk_plain, target=FACTOR * disk_plain, **ms),
        Figure(name="host_to_handover", value=handed_ms, baseline=copy_ms, target=HANDOVER_MS, **ms),
        Figure(name=f"store_reads_for_{CALLERS}", value=reads, baseline=CALLERS, target=1, unit=""),
    ]
    facts = {
        "size_bytes": len(bench.data),
        "rounds": bench.rounds,
        "times_of_its_baseline": {"store": round(store_ms / store_plain, 2), "disk": round(disk_ms / disk_plain, 2)},
        "store_load_to_plain_file": round(store_ms / file_plain, 2),
        # No load can take less: the bytes received from this store, not hashed, not kept.
        "store_alone_to_plain_file": round(received / file_plain, 2),
    }
    return figures, facts


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure cold loads and the hand-over of host memory.")
    parser.add_argument("--size", type=int, default=20 << 20, help="bytes of the weights file")
    parser.add_argument("--rounds", type=int, default=21, help="measurements per figure, at least 5")
    parser.add_argument("--out", type=Path, default=RESULTS / "cold_load.json", help="where the JSON goes")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        with tempfile.TemporaryDirectory(prefix="loraport-bench-") as name, s3_server(Path(name) / "s3") as store:
            bench = Bench(store, os.urandom(options.size), Path(name), max(5, options.rounds))
            store.put("verified", verified_key(bench.digest), io.BytesIO(bench.data), len(bench.data))
            figures, facts = asyncio.run(measure(bench))
    except Exception as error:
        print(f"error: could not measure: {error!r}", file=sys.stderr)
        return 1
    report(options.out, figures, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
