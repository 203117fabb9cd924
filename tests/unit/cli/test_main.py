import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loraport.bundle.envelope import SigningKey
from loraport.cli.main import describe, run
from loraport.dev.layout import Layout
from loraport.errors import NotFoundError, UnavailableError

ISSUE_COMMANDS = [
    "tenant create",
    "tenant list",
    "tenant show",
    "tenant set-quota",
    "key create",
    "key list",
    "key rotate",
    "key revoke",
    "signer create",
    "signer list",
    "signer revoke",
    "base add",
    "base list",
    "adapter register",
    "adapter import",
    "adapter verify",
    "adapter list",
    "adapter show",
    "adapter approve",
    "adapter revoke",
    "adapter share",
    "audit list",
    "audit verify",
    "alias set",
    "alias list",
    "alias delete",
    "adapter history",
    *(
        f"rollout {name}"
        for name in ("start", "status", "watch", "pause", "resume", "advance", "rollback", "abort", "list")
    ),
    "generate",
    "residency",
    "queues",
    "dev up",
    "dev status",
    "dev down",
]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("command", ISSUE_COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("command", [name for name in ISSUE_COMMANDS if name != "adapter verify"])
def test_every_command_takes_the_data_directory(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([*command.split(), "--help"])
    assert "--data" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["tenant", "create"],
        ["tenant", "set-quota", "acme"],
        ["tenant", "set-quota", "acme", "--unlimited", "colour"],
        ["tenant", "set-quota", "acme", "--queued-count", "-1"],
        ["key", "rotate", "0123456789", "--tenant", "acme", "--overlap-hours", "721"],
        ["adapter", "register", "dir"],
        ["adapter", "share", "acme/terse"],
        ["adapter", "share", "acme/terse", "--with", "globex", "--nobody"],
        ["adapter", "share", "acme/terse@v1", "--nobody"],
        ["adapter", "approve", "terse"],
        ["adapter", "revoke", "acme/terse"],
        ["adapter", "register", ".", "--tenant", "a", "--name", "n", "--base", "b", "--alias", "prod"],
        ["dev", "up", "--executors", "0"],
        ["dev", "up", "--dtype", "int4"],
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stack_of_nobody(tmp_path)
    monkeypatch.setenv("LORAPORT_DATA", str(tmp_path))
    assert run(arguments) == 2
    one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [["tenant", "list"], ["adapter", "list"], ["residency"], ["queues"], ["generate", "hi", "--tenant", "acme"]],
)
def test_without_a_stack_the_line_says_how_to_start_one(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--data", str(tmp_path)]) == 1
    assert "loraport dev up" in one_line(capsys)


def test_a_dead_stack_is_named_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack_of_nobody(tmp_path)
    assert run(["tenant", "list", "--data", str(tmp_path)]) == 1
    line = one_line(capsys)
    assert "127.0.0.1:9" in line
    assert "loraport dev status" in line


@pytest.mark.parametrize("more", [[], ["--stream"], ["--json"]])
def test_an_answer_that_does_not_come_names_its_request(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack_of_nobody(tmp_path)
    key = tmp_path / "keys" / "acme.key"
    key.write_text(f"lk_abcdefghij_{'a' * 43}\n")
    key.chmod(0o600)
    assert run(["generate", "hi", "--tenant", "acme", "--data", str(tmp_path), *more]) == 1
    assert re.search(r", request [0-9a-f-]{32,36}\b", one_line(capsys))


def test_a_missing_signer_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack_of_nobody(tmp_path)
    arguments = ["adapter", "register", str(tmp_path), "--tenant", "acme", "--name", "n", "--base", "b"]
    assert run([*arguments, "--data", str(tmp_path)]) == 1
    assert "loraport signer create --tenant acme" in one_line(capsys)


def test_several_signers_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack_of_nobody(tmp_path)
    for name in ("one", "two"):
        path = Layout.at(tmp_path).signer_key("acme", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        SigningKey.generate().save(path)
    arguments = ["adapter", "register", str(tmp_path), "--tenant", "acme", "--name", "n", "--base", "b"]
    assert run([*arguments, "--data", str(tmp_path)]) == 1
    assert "one, two" in one_line(capsys)


def test_verify_needs_no_stack_and_tells_an_unreadable_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adapter", "verify", str(tmp_path / "nowhere"), "--base", str(tmp_path)]) == 1
    one_line(capsys)


def test_errors_carry_their_advice_and_stay_one_line() -> None:
    assert describe(NotFoundError("no tenant x", reason="TENANT_NOT_FOUND")) == (
        "TENANT_NOT_FOUND: no tenant x (make one with: loraport tenant create NAME)"
    )
    assert describe(UnavailableError("two\nlines")) == "two lines"
    assert describe(NotFoundError("no such adapter.", reason="ADAPTER_NOT_FOUND", request_id="r-1")).startswith(
        "ADAPTER_NOT_FOUND: no such adapter, request r-1 (see: "
    )
    assert describe(FileNotFoundError(2, "No such file or directory", "/x")) == "No such file or directory: /x"


def test_the_command_starts_without_what_it_does_not_need() -> None:
    code = (
        "import sys, loraport.cli.main; "
        "print([m for m in ('torch', 'transformers', 'grpc', 'numpy', 'cryptography') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_reader_that_goes_away_is_no_failure_with_a_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'from loraport.cli.main import main; main()' adapter --help | head -0"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def stack_of_nobody(data: Path) -> None:
    """Writes the endpoints of a stack whose ports nobody listens on."""
    from loraport.dev.credentials import ensure_credentials

    layout = Layout.at(data)
    ensure_credentials(layout, [])
    nobody = "127.0.0.1:9"
    credentials = {"ca": "pki/ca.pem", "admin_certificate": "pki/admin.pem", "admin_key": "pki/admin.key"}
    endpoints = {
        "schema": "loraport.endpoints.v1",
        "router": nobody,
        "router_admin": nobody,
        "registry": nobody,
        "loader": nobody,
        "loader_upload": nobody,
        "credentials": {**credentials, "api_keys": "keys"},
    }
    layout.endpoints.write_text(json.dumps(endpoints))
