"""The disk tier's books and files: within budget, whole files only, safe to delete, adopted after a restart."""

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraport.bundle.digest import sha256_digest
from services.loader.disk_cache import DiskCache
from services.loader.disk_tier import DiskTier

DATA = {sha256_digest(bytes([n]) * 100): bytes([n]) * 100 for n in range(4)}
A, B, C, D = DATA
ACME = ("acme",)


def put(cache: DiskCache, digest: str, tenants: tuple[str, ...] = ACME) -> bool:
    return cache.put(digest, 100, iter([DATA[digest][:30], DATA[digest][30:]]), tenants=tenants)


def read(cache: DiskCache, digest: str, size: int = 100) -> bytes | None:
    file = cache.open_file(digest, size, tenants=ACME)
    if file is None:
        return None
    with file:
        return file.read()


def path_of(root: Path, digest: str) -> Path:
    return root / "sha256" / digest[7:9] / digest[9:]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    cache = DiskCache(tmp_path / "disk", 250)
    cache.open()
    before = open_below(tmp_path)
    yield cache
    assert open_below(tmp_path) == before
    cache._tier.check()


def open_below(folder: Path) -> list[str]:
    """What this process has open there. Elsewhere it may be that of other tests, which a collector closes at any time."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if Path(path).is_relative_to(folder))


@pytest.fixture
def root(cache: DiskCache) -> Path:
    return cache._root


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if not path.is_dir()}


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 130), st.booleans()), max_size=40))
def test_books_stay_within_the_budget(steps: list[tuple[str, int, bool]]) -> None:
    tier, held = DiskTier(100), {}
    for digest, size, forget in steps:
        if forget or size < 1:
            tier.forget(digest)
            held.pop(digest, None)
            continue
        before = tier.digests()
        leaving = tier.admit(digest, size, tenants=ACME)
        if leaving is None:
            assert digest in held or size > 100
        else:
            assert leaving == list(before[: len(leaving)])  # the least recently used
            held[digest] = size
            for old in leaving:
                del held[old]
        tier.check()
        assert set(tier.digests()) == set(held)
        assert tier.used_bytes == sum(held.values())


def test_nothing_of_no_size_is_entered() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DiskTier(10).admit("a", 0, tenants=ACME)


def test_files_are_whole_private_and_under_their_digest(cache: DiskCache, root: Path) -> None:
    assert read(cache, A) is None
    assert put(cache, A)
    assert not put(cache, A)
    assert read(cache, A) == DATA[A]
    assert files(root) == {path_of(root, A)}
    assert stat.S_IMODE(path_of(root, A).stat().st_mode) == 0o600
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_the_least_recently_used_leaves_and_what_never_fits_is_not_tried(cache: DiskCache, root: Path) -> None:
    put(cache, A)
    put(cache, B)
    read(cache, A)
    assert put(cache, C)
    assert files(root) == {path_of(root, A), path_of(root, C)}
    assert not cache.put(D, 251, iter([]), tenants=ACME)
    assert cache.used_bytes == 200


def test_a_restart_adopts_sweeps_and_keeps_the_order(cache: DiskCache, root: Path) -> None:
    put(cache, A)
    put(cache, B)
    for age, digest in ((50, A), (90, B)):
        os.utime(path_of(root, digest), (1e9 - age, 1e9 - age))
    (root / "tmp" / "half").write_bytes(b"x")
    (root / "sha256" / "not-ours").mkdir()
    (root / "sha256" / A[7:9] / "stray").write_bytes(b"x")
    (root / "sha256" / A[7:9] / ("f" * 62)).symlink_to("/etc/passwd")
    again = DiskCache(root, 250)
    again.open()
    assert again._tier.digests() == (B, A)
    assert not list((root / "tmp").iterdir())
    assert read(again, A) == DATA[A]
    smaller = DiskCache(root, 120)
    smaller.open()
    assert smaller._tier.digests() == (A,)
    assert not path_of(root, B).exists()


@pytest.mark.parametrize("what", ["all", "file", "folder"])
def test_it_may_be_deleted_at_any_moment(cache: DiskCache, root: Path, what: str) -> None:
    put(cache, A)
    file = cache.open_file(A, 100, tenants=ACME)
    if what == "file":
        path_of(root, A).unlink()
    else:
        shutil.rmtree(root if what == "all" else root / "sha256")
    assert file is not None
    with file:
        assert file.read() == DATA[A]
    assert read(cache, A) is None
    assert cache.used_bytes == 0
    assert put(cache, A)
    assert read(cache, A) == DATA[A]
    assert cache.spoiled_count == 0


@pytest.mark.parametrize("what", ["link", "folder link", "pipe", "directory", "longer", "shorter"])
def test_what_is_not_our_file_is_neither_followed_nor_waited_for(cache: DiskCache, root: Path, what: str) -> None:
    put(cache, A)
    path, other = path_of(root, A), root.parent / "other"
    other.write_bytes(DATA[A])
    match what:
        case "link":
            path.unlink()
            path.symlink_to(other)
        case "folder link":
            shutil.move(path.parent, root.parent / "elsewhere")
            path.parent.symlink_to(root.parent / "elsewhere")
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "directory":
            path.unlink()
            path.mkdir()
        case "longer":
            path.write_bytes(DATA[A] + b"x")
        case "shorter":
            path.write_bytes(DATA[A][:-1])
    assert read(cache, A) is None
    assert cache.spoiled_count == 1
    assert cache.used_bytes == 0
    assert other.read_bytes() == DATA[A]


def test_a_write_that_fails_or_is_cut_leaves_nothing(cache: DiskCache, root: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x" * 50
        raise OSError(28, "No space left on device")

    assert not cache.put(A, 100, failing(), tenants=ACME)
    assert not cache.put(A, 100, iter([b"x" * 50]), tenants=ACME)
    with pytest.raises(RuntimeError):
        cache.put(A, 100, (1 / 0 if False else _raise() for _ in range(1)), tenants=ACME)
    assert files(root) == set()
    assert cache.used_bytes == 0
    assert put(cache, A)


def _raise() -> bytes:
    raise RuntimeError("a bug")


def test_what_is_forgotten_while_it_is_written_does_not_stay(cache: DiskCache, root: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        begun.set()
        go.wait(60)
        yield DATA[A]

    thread = threading.Thread(target=cache.put, args=(A, 100, pieces()), kwargs={"tenants": ACME})
    thread.start()
    begun.wait(60)
    assert read(cache, A) is None  # not whole yet
    assert not put(cache, A)
    cache.forget(A)
    go.set()
    thread.join()
    assert files(root) == set()
    assert cache.used_bytes == 0


def test_a_directory_that_cannot_be_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        DiskCache(tmp_path / "file" / "disk", 10).open()
    good = DiskCache(tmp_path / "disk", 1000)
    good.open()
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").write_bytes(b"in the way")
    assert not put(good, A)  # said in the log; nothing fails
    assert good.used_bytes == 0
