"""A loader whose world can break at any operation: files, memory, store and registry share one fuse.

Run as a program it is the loader that is killed: for every operation of an upload and of two loads it forks a child
that the kernel kills just before it, then a second one that has to find the world clean and do the work.
"""

import asyncio
import contextlib
import gc
import io
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from loraport.bundle.base import base_id
from loraport.bundle.digest import sha256_digest
from loraport.bundle.envelope import SigningKey
from services.loader import disk_cache, intake, receive, sealed
from services.loader.bad_digests import BadDigests
from services.loader.disk_cache import DiskCache
from services.loader.host_tier import HostTier
from services.loader.intake import Intake, IntakeLimits
from services.loader.lane import Lane
from services.loader.ports import ObjectMissing, RevisionInfo
from services.loader.receive import ChunkPart, SessionPart
from services.loader.resolve import Resolver
from services.loader.shell import Granted, HostLoader
from services.loader.slots import Slots
from services.loader.turns import Turns
from services.shared import handover
from services.shared.catalog import RevisionItem
from services.shared.clock import SystemClock
from services.shared.errors import LoraportError
from services.shared.handover import lease_key
from services.shared.statements import Record, Verification, open_statement, seal
from tests.bundle_files import small_base
from tests.loader_rig import FakeRegistry

PIECE = 700
# The kernel releases a descriptor whatever close says; and it gives none back together with an error.
NEVER_FAILS = frozenset({"close"})
OPENS = frozenset({"memfd_create", "open", "dup", "TemporaryFile", "fdopen"})


class Fuse:
    """Counts operations and blows at number `at`, before or after it, as an error or by killing the process."""

    def __init__(self, at: int = 0, *, after: bool = False, kill: bool = False) -> None:
        self.at, self.after, self.kill = at, after, kill
        self.count = 0
        self.blown = ""
        self._lock = threading.Lock()

    def run(self, name: str, error: Callable[[], Exception], operation: Callable[[], Any]) -> Any:
        with self._lock:
            self.count += 1
            mine = self.count == self.at
        verb = name.rpartition(".")[2]
        if mine and not self.kill and (verb in NEVER_FAILS or (self.after and verb in OPENS)):
            mine, self.blown = False, f"{name} (cannot fail so)"
        if mine and not self.after:
            self._blow(name, error)
        try:
            return operation()
        finally:
            if mine:  # also when it failed by itself: a folder that was there already
                self._blow(name, error)

    def _blow(self, name: str, error: Callable[[], Exception]) -> None:
        self.blown = name
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error()


def broken_io() -> Exception:
    return OSError(5, "Input/output error")


class Faulty:
    """A module or a file some of whose operations go through the fuse."""

    def __init__(self, real: Any, names: str, fuse: Fuse, label: str) -> None:
        self._real, self._names, self._fuse, self._label = real, frozenset(names.split()), fuse, label

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in self._names:
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            result = self._fuse.run(f"{self._label}.{name}", broken_io, lambda: value(*arguments, **options))
            if name in ("TemporaryFile", "fdopen"):
                return Faulty(result, "write read seek close", self._fuse, f"{self._label} file")
            return result

        return call

    def __enter__(self) -> "Faulty":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def fused(fuse: Fuse) -> Iterator[None]:
    """Puts the fuse between the loader and its kernel."""
    real = [(sealed, "os"), (sealed, "fcntl"), (handover, "fcntl"), (disk_cache, "os"), (receive, "tempfile")]
    before = [(module, name, getattr(module, name)) for module, name in real]
    pauses = intake.REPORT_PAUSES_S
    sealed.os = Faulty(os, "memfd_create pwrite pread dup close", fuse, "memory")  # type: ignore[assignment]
    sealed.fcntl = Faulty(sealed.fcntl, "fcntl", fuse, "memory")  # type: ignore[assignment]
    handover.fcntl = Faulty(handover.fcntl, "fcntl", fuse, "memory")  # type: ignore[assignment]
    names = "mkdir listdir unlink open fstat utime replace stat write close fdopen"
    disk_cache.os = Faulty(os, names, fuse, "disk")  # type: ignore[assignment]
    receive.tempfile = Faulty(tempfile, "TemporaryFile", fuse, "spool")  # type: ignore[assignment]
    intake.REPORT_PAUSES_S = (0.0, 0.0, 0.0)
    try:
        yield
    finally:
        intake.REPORT_PAUSES_S = pauses
        for module, name, value in before:
            setattr(module, name, value)


class FileStore:
    """The port `ObjectStore` over a folder: whole objects or none, as S3 promises."""

    def __init__(self, folder: Path, fuse: Fuse) -> None:
        self._folder, self._fuse = folder, fuse

    def _run(self, name: str, operation: Callable[[], Any]) -> Any:
        return self._fuse.run(f"store.{name}", lambda: LoraportError("STORE_UNAVAILABLE"), operation)

    def prepare(self) -> None:
        self._run("prepare", lambda: None)

    def put(self, area: str, key: str, data: Any, size_bytes: int) -> None:
        def put() -> None:
            content, path = data.read(size_bytes), self._folder / area / key
            assert len(content) == size_bytes
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._folder / f"part-{os.getpid()}"
            beside.write_bytes(content)
            beside.replace(path)

        self._run("put", put)

    def read(self, area: str, key: str) -> Iterator[bytes]:
        path = self._folder / area / key
        if not self._run("open", path.exists):
            raise ObjectMissing(key)
        content = path.read_bytes()
        for start in range(0, len(content), PIECE):
            yield self._run("piece", lambda start=start: content[start : start + PIECE])

    def delete(self, area: str, key: str) -> None:
        self._run("delete", lambda: (self._folder / area / key).unlink(missing_ok=True))

    def keys(self, area: str, prefix: str) -> list[str]:
        return self._run("keys", lambda: [key for key in self.stored(area) if key.startswith(prefix)])

    def stored(self, area: str) -> list[str]:
        """What lies there, without the fuse."""
        top = self._folder / area
        return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())


class Signed:
    """A bundle and everything that is signed about it; the same for every world."""

    def __init__(self) -> None:
        self.key, self.loader_key, self.base = SigningKey.generate(), SigningKey.generate(), small_base()
        self.bundle = FakeRegistry(self.key, self.loader_key, self.base).register()
        record = Record(
            revision_id=self.bundle.revision_id,
            tenant="acme",
            adapter="pirate",
            version=1,
            base_id=base_id(self.base),
            weights_digest=self.bundle.digest,
            weights_size=len(self.bundle.weights),
            state="ACTIVE",
            sequence=1,
            issued_time=int(time.time()),
        )
        self.record = seal(record, self.key)
        self.session = seal(self.bundle.session, self.key)


class World:
    """What outlives a loader process: the registry, the store, the node's disk. One bundle waits to be uploaded."""

    def __init__(self, root: Path, signed: Signed) -> None:
        self.root, self.signed, self.bundle = root, signed, signed.bundle
        for name in ("store/quarantine", "store/verified", "spool", "disk"):
            (root / name).mkdir(parents=True)
        self.state = "PENDING"

    @property
    def state(self) -> str:
        return (self.root / "state").read_text()

    @state.setter
    def state(self, value: str) -> None:
        beside = self.root / "state.new"
        beside.write_text(value)
        beside.replace(self.root / "state")

    def disk_files(self) -> list[Path]:
        return [path for path in (self.root / "disk").rglob("*") if path.is_file()]

    def check_bytes(self) -> None:
        """Whatever lies in the verified bucket or under a digest on the disk is whole and right."""
        for path in (self.root / "store" / "verified").rglob("*"):
            assert not path.is_file() or sha256_digest(path.read_bytes())[7:] == path.parent.name + path.name
        for path in self.disk_files():
            if path.parent.name != "tmp":
                assert sha256_digest(path.read_bytes())[7:] == path.parent.name + path.name

    def check_clean(self) -> None:
        """Nothing half-done is left anywhere."""
        self.check_bytes()
        assert FileStore(self.root / "store", Fuse()).stored("quarantine") == []
        assert [path for path in self.disk_files() if path.parent.name == "tmp"] == []
        assert list((self.root / "spool").iterdir()) == []


class Registry:
    """The port `RegistryPort` over a world."""

    def __init__(self, world: World, fuse: Fuse) -> None:
        self._world, self._fuse = world, fuse

    def _run(self, name: str, operation: Callable[[], Any]) -> Any:
        return self._fuse.run(f"registry.{name}", lambda: LoraportError("REGISTRY_UNAVAILABLE"), operation)

    def is_active(self, revision_id: str) -> bool:
        return self._world.state == "ACTIVE"

    def needed(self) -> frozenset[str]:
        return frozenset()

    def active_digest(self, digest: str) -> bool:
        return self._world.state == "ACTIVE"

    async def require_fresh(self) -> None:
        self._run("require_fresh", lambda: None)

    def seen(self) -> None:
        return None

    def require_alive(self) -> None:
        return None

    async def require_logged(self, item: RevisionItem) -> None:
        self._run("require_logged", lambda: None)

    async def item(self, revision_id: str) -> RevisionItem:
        bundle = self._world.bundle
        return self._run(
            "item",
            lambda: RevisionItem(
                revision_id=revision_id,
                tenant="acme",
                adapter="pirate",
                version=1,
                state=self._world.state,
                base_model="small",
                weights_digest=bundle.digest,
                size_bytes=len(bundle.weights),
                max_rank=4,
                record_envelope=self._world.signed.record,
                shared_tenants=frozenset(),
            ),
        )

    async def revision(self, revision_id: str) -> RevisionInfo:
        world = self._world
        return self._run("revision", lambda: RevisionInfo(revision_id, world.state, world.bundle.manifest, (), ()))

    async def base_spec(self, base_model: str) -> Any:
        return self._run("base_spec", lambda: self._world.signed.base)

    async def admit(self, envelope: bytes) -> str:
        def admit() -> str:
            keys = {self._world.signed.loader_key.key_id: self._world.signed.loader_key.public_pem}
            assert open_statement(Verification, envelope, keys).admitted
            self._world.state = "VERIFIED"
            return "VERIFIED"

        return self._run("admit", admit)


class Loader:
    """A loader without its process: what `services.loader.service` puts together."""

    def __init__(self, world: World, fuse: Fuse) -> None:
        self.world, clock = world, SystemClock()
        self.store = FileStore(world.root / "store", fuse)
        registry: Any = Registry(world, fuse)
        trusted = {world.signed.key.key_id: world.signed.key.public_pem}
        self.disk = DiskCache(world.root / "disk", 1 << 20)
        self.host = HostLoader(
            store=self.store,
            registry=registry,
            resolver=Resolver(registry, trusted),
            clock=clock,
            tier=HostTier(1 << 20),
            bad=BadDigests(60.0),
            slots=Slots(2, per_key=2),
            lane=Lane("load", 3),
            disk=self.disk,
            hands_over=True,
        )
        self.intake = Intake(
            store=self.store,
            registry=registry,
            key=world.signed.loader_key,
            trusted=trusted,
            clock=clock,
            turns=Turns(Slots(2, per_key=2)),
            lane=Lane("upload", 2),
            limits=IntakeLimits(verifier="loader", max_weights_bytes=1 << 20, spool_dir=str(world.root / "spool")),
        )

    def start(self) -> None:
        self.disk.open()
        self.store.prepare()
        self.intake.sweep()

    async def work(self) -> None:
        """Uploads, activates, loads from the store and, after an eviction, from the disk; raises what goes wrong."""
        bundle = self.world.bundle
        try:
            outcome = await self.intake.upload(self._parts())
        finally:
            await asyncio.gather(*self.intake._jobs, return_exceptions=True)
        assert outcome.admitted
        self.world.state = "ACTIVE"
        for _ in range(2):
            [granted] = [e async for e in self.host.ensure(bundle.revision_id, holder="x") if isinstance(e, Granted)]
            try:
                assert self._read(granted.lease_id) == bundle.weights
                fd = self.host.hand_over(granted.token, lease_key(granted.lease_id))
                if fd is not None:
                    os.close(fd)
            finally:
                self.host.release(granted.lease_id, holder="x")
                await self.settle()
            self.evict()

    async def _parts(self) -> AsyncGenerator[Any, None]:
        yield SessionPart(self.world.signed.session)
        yield ChunkPart("config", self.world.bundle.config)
        for start in range(0, len(self.world.bundle.weights), PIECE):
            yield ChunkPart("weights", self.world.bundle.weights[start : start + PIECE])

    def _read(self, lease_id: str) -> bytes:
        reader, data = self.host.open_reader(lease_id, holder="x"), io.BytesIO()
        try:
            while piece := reader.next_piece():
                data.write(piece)
        finally:
            reader.close()
        return data.getvalue()

    async def settle(self) -> None:
        while self.host._tasks:
            await asyncio.gather(*self.host._tasks, return_exceptions=True)

    def evict(self) -> None:
        tier = self.host._tier
        self.host._close(tier.reserve("test", tier.budget_bytes, tenants=("test",)))
        tier.cancel("test")

    def check_memory(self) -> None:
        """All memory that is open is in the books, and nothing waits for anybody."""
        if self._strays():
            gc.collect()  # a traceback may hold a frame that holds a file
        assert self._strays() == []
        tier = self.host._tier
        tier.check()
        self.disk._tier.check()
        assert {entry.digest for entry in tier.entries()} == set(self.host._loaded)
        assert (tier._leases, tier._reserved, self.host._loads) == ({}, {}, {})
        assert len(self.host._tokens) == 0

    def _strays(self) -> list[str]:
        """What is open that should not be: memory that is in no book, files of this world."""
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        memory = [link for link in links if "memfd:loraport" in link]
        return memory[len(self.host._loaded) :] + [link for link in links if str(self.world.root) in link]


async def whole_life(world: World, fuse: Fuse) -> Loader:
    """Starts a loader and lets it work; raises what goes wrong."""
    loader = Loader(world, fuse)
    loader.start()
    await loader.work()
    return loader


def _child(work: Callable[[], None]) -> int:
    """Runs something in a forked process; returns the signal that ended it (0: none, -1: it failed)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -int(os.WEXITSTATUS(status) != 0)


def _die(world: World, at: int) -> None:
    fuse = Fuse(at, kill=True)
    with fused(fuse):
        asyncio.run(whole_life(world, fuse))


def _recover(world: World) -> None:
    loader = Loader(world, Fuse())
    loader.start()
    world.check_clean()
    asyncio.run(loader.work())
    world.check_clean()
    loader.check_memory()


def kill_everywhere(root: Path) -> int:
    """Kills a loader before each of its operations; returns how many there were."""
    signed = Signed()
    for at in itertools.count(1):
        world = World(root / str(at), signed)
        died = _child(lambda world=world, at=at: _die(world, at))
        assert died in (0, signal.SIGKILL), (at, died)
        world.check_bytes()
        assert _child(lambda world=world: _recover(world)) == 0, at
        if not died:
            return at - 1
    raise AssertionError("unreachable")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, capture_logs():
        print(kill_everywhere(Path(folder)))
