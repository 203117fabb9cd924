"""A file that services rely on is there whole or not at all."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraport.whole_file import replace_file


def test_what_was_there_stays_when_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace_file(path, [b"old"])

    def parts() -> Iterator[bytes]:
        yield b"half of the "
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_file(path, parts())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_durable_before_the_name_and_the_name_before_it_returns(tmp_path: Path, monkeypatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "content")
        fsync(descriptor)

    def noted_replace(self: Path, target: Path) -> Path:
        done.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    replace_file(tmp_path / "state", [b"a", b"b"])
    assert done == ["content", "name", "folder"]
    assert (tmp_path / "state").read_bytes() == b"ab"


def test_nobody_else_reads_it_and_no_link_leads_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace_file(path, [b"secret"])
    assert path.stat().st_mode & 0o777 == 0o600
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / f".state.{os.getpid()}").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(path, [b"new"])
    assert not elsewhere.exists()
    assert path.read_bytes() == b"secret"
