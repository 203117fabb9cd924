"""Files that are there whole or not at all, whatever is killed or loses its power meanwhile."""

import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, parts: Iterable[bytes], *, mode: int = 0o600) -> None:
    """Puts `parts` in the place of what `path` was, if anything. Once it returns, a loss of power changes nothing.

    Raises:
        OSError: it cannot be written. What was there before is there still, but for a directory that cannot be made
            durable: then the new one may be there or not.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            # Before the rename: else the name may survive a loss of power and the content not.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
