"""What a model wrote, on a terminal and in a pipe."""

import sys

import pytest

from loraport.cli import generate

TEXT = "a\x1b[2Jb\x9bc\r\td\n👩\u200d👧"


@pytest.mark.parametrize(("terminal", "expected"), [(False, TEXT), (True, "a\ufffd[2Jb\ufffdc\ufffd\td\n👩\u200d👧")])
def test_text_steers_no_terminal_and_is_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, expected: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert generate._for_reader(TEXT) == expected
