"""A small file system of a stack's own, that can be filled to its last byte."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SIZE = 48 << 20
UNMOUNT_S = FILL_S = 60.0


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Makes `folder`, on a file system of its own where mounting one is allowed; gives whether it was."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "tmpfs", str(folder)]
    if not _done(mount):
        yield False
        return
    try:
        yield True
    finally:
        ends = time.monotonic() + UNMOUNT_S
        while not _done(["umount", str(folder)]):
            assert time.monotonic() < ends, f"{folder} is still in use"
            time.sleep(0.1)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leaves not a byte of the file system that `folder` is on, and gives them back."""
    filler = folder / "filler"
    try:
        ends = time.monotonic() + FILL_S
        with filler.open("wb", buffering=0) as file:
            # Others write there, and let go of what they wrote: until there is no room at a moment when it is looked at.
            while os.statvfs(folder).f_bavail:
                assert time.monotonic() < ends, f"{folder} does not fill"
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(1 << 16))
        yield
    finally:
        filler.unlink()


def _done(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
