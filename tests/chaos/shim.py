"""Clocks that are off and disks that are slow, for each process of a stack by itself: a library preloaded into it.

Go programs ask the kernel themselves, so the object store has neither; a proxy slows it down instead.
"""

import contextlib
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
# As `struct control` of shim.c has it.
CONTROL = struct.Struct("qqqq")
CLOCK, DISK, CLOCK_ASKED, DISK_DELAYED = range(0, CONTROL.size, 8)
NS = 1_000_000_000


class Shim:
    """What the processes of these names are told. Made by `preloaded`."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._told: dict[str, mmap.mmap] = {}
        for name in names:
            path = folder / name
            path.write_bytes(bytes(CONTROL.size))
            with path.open("r+b") as file:
                self._told[name] = mmap.mmap(file.fileno(), CONTROL.size)

    @contextlib.contextmanager
    def clock(self, off_s: float, *names: str) -> Iterator[None]:
        """Sets the wall clocks of these processes, and sets them right again; they must have looked at them."""
        with self._set(CLOCK, int(off_s * NS), CLOCK_ASKED, names):
            yield

    @contextlib.contextmanager
    def slow_disk(self, delay_s: float, *names: str) -> Iterator[None]:
        """Has every read, write and sync of a file wait in these processes; there must have been some."""
        with self._set(DISK, int(delay_s * NS), DISK_DELAYED, names):
            yield

    @contextlib.contextmanager
    def _set(self, place: int, value: int, counter: int, names: tuple[str, ...]) -> Iterator[None]:
        before = self._sum(counter, names)
        try:
            for name in names:
                struct.pack_into("q", self._told[name], place, value)
            yield
        finally:
            for name in names:
                struct.pack_into("q", self._told[name], place, 0)
        assert self._sum(counter, names) > before, f"{', '.join(names)} met nothing of it"

    def _sum(self, counter: int, names: tuple[str, ...]) -> int:
        return sum(struct.unpack_from("q", self._told[name], counter)[0] for name in names)


@contextlib.contextmanager
def preloaded(folder: Path, names: tuple[str, ...]) -> Iterator[Shim | None]:
    """Builds the library and preloads it into what this process starts from now on; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        yield None
        return
    folder.mkdir()
    library = folder / "shim.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield None
        return
    (folder / "control").mkdir()
    shim = Shim(folder / "control", names)
    mine = {"LD_PRELOAD": str(library), "CHAOS_CONTROL": str(folder / "control")}
    before = {name: os.environ.get(name) for name in mine}
    os.environ.update(mine)
    try:
        yield shim
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
