"""Copies of the log: a file of lines, the signed checkpoint first, then one leaf a line. Nothing in it is trusted.

Also the auditor's memory: the highest checkpoint that an audit has accepted, so that the next audit notices a log that
was cut short or written anew since.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from loraport.bundle.canonical import StrictJsonError, load_strict
from loraport.log.checkpoint import Floor
from loraport.log.leaf import MAX_LEAF_BYTES
from loraport.whole_file import replace_file

SCHEMA = "loraport.log-copy.v1"
FLOOR_SCHEMA = "loraport.log-audit.v1"
MAX_LINE = 16 << 10


class CopyError(ValueError):
    """A file that is no copy of a log; one line."""


def write_copy(path: Path, envelope: bytes, leaves: Iterable[bytes]) -> int:
    """Writes a copy, whole or not at all, and returns its number of leaves. Raises OSError."""
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        header = {"schema": SCHEMA, "checkpoint": base64.b64encode(envelope).decode()}
        yield json.dumps(header).encode() + b"\n"
        for body in leaves:
            yield body + b"\n"
            count += 1

    replace_file(path, lines(), mode=0o644)
    return count


def read_checkpoint(path: Path) -> bytes:
    """Returns the envelope of a copy's checkpoint.

    Raises:
        CopyError: the file does not begin as a copy does.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        line = file.readline(MAX_LINE)
    try:
        header = load_strict(line, max_bytes=MAX_LINE, max_depth=1)
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise CopyError(f"{path} is no copy of a log; make one with: loraport log export FILE")
        return base64.b64decode(header["checkpoint"], validate=True)
    except (StrictJsonError, KeyError, TypeError, binascii.Error):
        raise CopyError(f"{path} is no copy of a log; make one with: loraport log export FILE") from None


def read_leaves(path: Path) -> Iterator[bytes]:
    """Yields the lines after the first, without their ends; a line too long for a leaf is cut. Raises OSError."""
    with path.open("rb") as file:
        file.readline(MAX_LINE)
        while line := file.readline(MAX_LEAF_BYTES + 2):
            yield line.removesuffix(b"\n")


def read_floor(path: Path) -> Floor | None:
    """Returns what the last audit accepted, None before the first.

    Raises:
        CopyError: the file is there and cannot be used.
        OSError: it cannot be read.
    """
    try:
        value = load_strict(path.read_bytes(), max_bytes=MAX_LINE, max_depth=1)
        if not isinstance(value, dict) or value.get("schema") != FLOOR_SCHEMA:
            raise ValueError("schema")
        return Floor.of(value)
    except FileNotFoundError:
        return None
    except ValueError:
        raise CopyError(f"{path} is not an auditor's memory; remove it to audit without one") from None


def write_floor(path: Path, floor: Floor) -> None:
    """Remembers what an audit accepted. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, [json.dumps({"schema": FLOOR_SCHEMA, **asdict(floor)}).encode()])
