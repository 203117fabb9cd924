"""What blocks in the loader holds up only its own kind, and what is stopped or revoked leaves nothing behind."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import SigningKey
from services.loader import receive as receiving
from services.loader import resolve as resolving
from services.loader.bad_digests import BadDigests
from services.loader.disk_cache import DiskCache
from services.loader.host_tier import HostTier
from services.loader.lane import Lane
from services.loader.ports import RevisionInfo
from services.loader.receive import ChunkPart, Part, receive
from services.loader.resolve import Resolved, Resolver
from services.loader.shell import Granted, HostLoader
from services.loader.slots import Slots
from services.loader.store import verified_key
from services.shared.catalog import RevisionItem
from services.shared.clock import SystemClock
from services.shared.errors import LoraportError
from services.shared.statements import Record, seal

DATA = b"weights" * 100
DIGEST = sha256_digest(DATA)
ID = "sha256:" + "1" * 64


@pytest.fixture
async def blocked() -> AsyncIterator[None]:
    """The threads that everybody shares are held: whoever needs one waits."""
    gate, pool = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    held = asyncio.get_running_loop().run_in_executor(None, gate.wait)
    yield
    gate.set()
    await held


class Store:
    def read(self, area: str, key: str) -> Iterator[bytes]:
        yield DATA


class Registry:
    """Says that everything is ACTIVE until it is not; also resolves. `fresh` holds whoever asks whether it is."""

    def __init__(self) -> None:
        self.active = True
        self.fresh = asyncio.Event()
        self.fresh.set()
        self.asked = 0

    async def resolve(self, revision_id: str) -> Resolved:
        return Resolved(revision_id, "acme", DIGEST, len(DATA), b"", b"")

    def forget(self, revision_ids: Any) -> None:
        list(revision_ids)

    async def require_fresh(self) -> None:
        self.asked += 1
        await self.fresh.wait()

    def is_active(self, revision_id: str) -> bool:
        return self.active

    def active_digest(self, digest: str) -> bool:
        return self.active

    def seen(self) -> None:
        return None

    def needed(self) -> frozenset[str]:
        return frozenset()


def item(**changes: Any) -> RevisionItem:
    found = RevisionItem(ID, "acme", "bot", 1, "REVOKED", "tiny", DIGEST, len(DATA), 8, b"", frozenset())
    return dataclasses.replace(found, **changes)


def loader(registry: Any, disk: DiskCache | None = None) -> HostLoader:
    return HostLoader(
        store=Store(),
        registry=registry,
        resolver=registry,
        clock=SystemClock(),
        tier=HostTier(1 << 20),
        bad=BadDigests(60.0),
        slots=Slots(2, per_key=2),
        lane=Lane("load", 3),
        disk=disk,
    )


async def ensure(host: HostLoader) -> Granted:
    *_, granted = [event async for event in host.ensure(ID, holder="x")]
    assert isinstance(granted, Granted)
    return granted


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_load_needs_no_thread_that_others_may_hold(blocked: None) -> None:
    host = loader(Registry())
    async with asyncio.timeout(60):
        granted = await ensure(host)
    host.release(granted.lease_id, holder="x")
    await host.close()


async def test_an_upload_needs_no_thread_that_others_may_hold(blocked: None, tmp_path: Path) -> None:
    async def parts() -> AsyncGenerator[Part, None]:
        yield ChunkPart("config", b"{}")
        yield ChunkPart("weights", b"abc")

    async with asyncio.timeout(60):
        received = await receive(parts(), Lane("upload", 1), weights_size=3, spool_dir=str(tmp_path), patience_s=60)
    received.weights.close()


async def test_a_spool_is_closed_once_nobody_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, gate = threading.Event(), threading.Event()
    files: list[BinaryIO] = []

    def append(file: BinaryIO, data: bytes) -> None:
        files.append(file)
        writing.set()
        gate.wait(60)
        file.write(data)

    async def parts() -> AsyncGenerator[Part, None]:
        yield ChunkPart("config", b"{}")
        yield ChunkPart("weights", b"abc")

    monkeypatch.setattr(receiving, "append", append)
    task = asyncio.create_task(
        receive(parts(), Lane("upload", 1), weights_size=3, spool_dir=str(tmp_path), patience_s=60)
    )
    await until(writing.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not files[0].closed, "its number may be another file's before the thread has written"
    gate.set()
    await until(lambda: files[0].closed)


async def test_what_is_revoked_before_it_is_copied_to_disk_does_not_stay_there(tmp_path: Path) -> None:
    registry, disk = Registry(), DiskCache(tmp_path, 1 << 20)
    disk.open()
    host = loader(registry, disk)
    await host._writing.acquire()
    granted = await ensure(host)
    registry.active = False
    host.gone([item()])
    host._writing.release()
    await until(lambda: not host._tasks)
    assert disk._tier.digests() == ()
    host.release(granted.lease_id, holder="x")
    assert host.inventory().entries == ()
    await host.close()


async def test_what_is_revoked_while_its_checkpoint_is_asked_for_is_not_brought_back() -> None:
    registry = Registry()
    host = loader(registry)
    granted = await ensure(host)
    registry.active = False
    host.gone([item()])  # the lease keeps it
    registry.active = True
    registry.fresh.clear()
    again = asyncio.create_task(ensure(host))
    await until(lambda: registry.asked == 2)
    registry.active = False
    host.gone([item()])
    registry.fresh.set()
    with pytest.raises(LoraportError, match="REVISION_NOT_ACTIVE"):
        await again
    host.release(granted.lease_id, holder="x")
    await until(lambda: host.inventory().entries == ())
    await host.close()


class Queue(Registry):
    """Every revision is ACTIVE: `<tenant>/<bytes>` is a tenant's revision of these bytes."""

    async def resolve(self, revision_id: str) -> Resolved:
        tenant, content = revision_id.split("/")
        return Resolved(revision_id, tenant, sha256_digest(content.encode()), len(content), b"", b"")


async def test_nobody_waits_for_bytes_behind_what_another_tenant_queues() -> None:
    gate, reads = threading.Event(), []

    class Gated:
        def read(self, area: str, key: str) -> Iterator[bytes]:
            content = next(c for c in ("own", "shared") if verified_key(sha256_digest(c.encode())) == key)
            reads.append(content)
            if content == "own":
                gate.wait(60)
            yield content.encode()

    host = loader(Queue())
    host._store = Gated()  # type: ignore[assignment]
    host._slots = Slots(2, per_key=1)

    async def ask(revision_id: str) -> Granted:
        *_, granted = [event async for event in host.ensure(revision_id, holder=revision_id)]
        return granted  # type: ignore[return-value]

    own = asyncio.create_task(ask("first/own"))
    await until(lambda: reads == ["own"])
    behind = asyncio.create_task(ask("first/shared"))  # waits for its tenant's only turn
    await until(lambda: len(host._loads) == 2)
    async with asyncio.timeout(60):
        await ask("second/shared")
        assert (await behind).resolved.tenant == "first"
    assert not own.done()
    assert reads == ["own", "shared"]
    gate.set()
    await own
    await until(lambda: not host._tasks)
    assert reads == ["own", "shared"]  # the turn that came too late did nothing
    shared = host._tier.find(sha256_digest(b"shared"))
    assert shared is not None
    assert shared.tenants == {"first", "second"}
    await host.close()


class Asked:
    """A registry whose answers wait for `gate`."""

    def __init__(self, found: RevisionItem) -> None:
        self.found, self.gate, self.asked = found, asyncio.Event(), 0

    def require_alive(self) -> None:
        return

    async def item(self, revision_id: str) -> RevisionItem:
        return self.found

    async def require_logged(self, found: RevisionItem) -> None:
        self.asked += 1
        await self.gate.wait()

    async def revision(self, revision_id: str) -> RevisionInfo:
        return RevisionInfo(revision_id, "ACTIVE", b"manifest", (), ())


async def test_a_record_that_was_being_checked_when_the_trust_root_changed_is_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolving, "_check_manifest", lambda envelope, record: None)
    key = SigningKey.generate()
    record = Record(ID, "acme", "bot", 1, "sha256:" + "3" * 64, DIGEST, len(DATA), "ACTIVE", 1, 0)
    registry = Asked(item(state="ACTIVE", record_envelope=seal(record, key)))
    trusted = {key.key_id: key.public_pem}
    resolver = Resolver(registry, trusted)
    asked = asyncio.create_task(resolver.resolve(ID))
    await until(lambda: registry.asked == 1)
    trusted.clear()
    resolver.forget_all()
    registry.gate.set()
    with pytest.raises(LoraportError, match="REVISION_NOT_ACTIVE"):
        await asked
    assert not resolver._kept
