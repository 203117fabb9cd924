"""A local stack comes up, says what it does, and goes, whatever happens to it."""

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import Stack, add_tenant, environment, free_port_base, running, wait_until

pytestmark = pytest.mark.e2e


def test_up_is_idempotent_and_down_leaves_nothing(stack: Stack) -> None:
    again = stack.up("--json")
    assert again.code == 0
    assert again.json["already_running"] is True
    assert again.json["router"] == f"127.0.0.1:{stack.port_base}"
    for name in ("ca", "admin_certificate", "admin_key", "api_keys"):
        assert Path(again.json["credentials"][name]).exists(), name


@pytest.mark.parametrize(
    ("option", "value"),
    [("--executors", "2"), ("--dtype", "bfloat16"), ("--base", "other=/tmp"), ("--port-base", "9999")],
)
def test_up_does_not_take_another_stack_for_the_one_asked_for(stack: Stack, option: str, value: str) -> None:
    answer = stack.up(option, value)
    assert answer.code == 2
    assert f"with another {option}" in answer.error


def test_status_shows_every_process(stack: Stack) -> None:
    answer = stack.ok("dev", "status")
    assert answer["running"] is True
    names = {row["name"] for row in answer["processes"]}
    assert names == {"valkey", "s3", "registry", "loader", "router", "tiny-0"}
    assert {row["state"] for row in answer["processes"]} == {"serving"}


def test_logs_are_json_and_hold_no_secret(stack: Stack) -> None:
    secrets = [path.read_text().split()[-1] for path in (stack.data / "secrets").iterdir()]
    secrets += [path.read_text().strip() for path in (stack.data / "keys").iterdir()]
    for log in (stack.data / "logs").iterdir():
        text = log.read_text()
        assert not [secret for secret in secrets if secret in text], log.name


def test_two_bases_have_an_executor_each_and_their_own_adapters(tmp_path: Path, world_dir: Path) -> None:
    first, second = world_dir / "bases" / "tiny", tmp_path / "second"
    shutil.copytree(first, second)
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(config | {"rms_norm_eps": config["rms_norm_eps"] * 10}))
    bases = ("--base", f"one={first}", "--base", f"two={second}")
    with running(tmp_path / "data", *bases, "--dtype", "bfloat16") as fleet:
        add_tenant(fleet, "acme")
        made = {}
        for base in ("one", "two"):
            named = ("--tenant", "acme", "--name", f"on-{base}", "--base", base, "--approve", "--alias", "prod")
            made[base] = fleet.ok("adapter", "register", str(world_dir / "bundles" / "alpha_8"), *named)["revision_id"]
            answer = fleet.ok("generate", "a", "--tenant", "acme", "--adapter", f"on-{base}", "--max-tokens", "2")
            assert (answer["executor"], answer["revision_id"]) == (f"{base}-0", made[base])
        assert made["one"] != made["two"], "the same bytes on another base are another revision"


def test_two_stacks_run_side_by_side_and_two_executors_in_one(stack: Stack, tmp_path: Path, tiny: str) -> None:
    with running(tmp_path / "other", "--base", tiny, "--executors", "2") as other:
        other.ok("tenant", "create", "elsewhere")
        assert {row["tenant"] for row in other.ok("tenant", "list")} == {"elsewhere"}
        assert "elsewhere" not in {row["tenant"] for row in stack.ok("tenant", "list")}
        assert {row["executor"] for row in other.ok("residency")} == {"tiny-0", "tiny-1"}
        assert stack.ok("dev", "status")["running"] is True
    assert stack.ok("dev", "status")["running"] is True


def test_a_taken_port_is_one_line_and_exit_code_2(tmp_path: Path, tiny: str) -> None:
    stack = Stack(tmp_path / "data", free_port_base())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", stack.port_base + 1))
        taken.listen()
        answer = stack.up("--base", tiny)
    assert answer.code == 2
    assert f"port {stack.port_base + 1} (registry) is taken" in last_line(answer.err)
    assert stack.leftovers() == []


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_a_bad_base_is_one_line_and_exit_code_2(tmp_path: Path, what: str) -> None:
    base = tmp_path / "base"
    if what == "empty":
        base.mkdir()
    elif what == "file":
        base.write_text("")
    stack = Stack(tmp_path / "data", free_port_base())
    answer = stack.up("--base", str(base))
    assert answer.code == 2
    assert last_line(answer.err).startswith("error: --base base: ")
    assert stack.leftovers() == []


def test_a_data_directory_that_cannot_be_written_is_one_line(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "file").write_text("")
    answer = Stack(tmp_path / "file" / "data", free_port_base()).up("--base", tiny)
    assert answer.code == 2
    assert "cannot use the data directory" in last_line(answer.err)


def test_a_process_that_dies_on_the_way_up_takes_all_down_and_is_quoted(tmp_path: Path, tiny: str) -> None:
    stack = Stack(tmp_path / "data", free_port_base())
    # The database cannot be opened, so the registry ends while the stack comes up.
    (stack.data / "registry" / "registry.db").mkdir(parents=True)
    answer = stack.up("--base", tiny)
    assert answer.code == 2
    assert last_line(answer.err).startswith("error: registry ended")
    assert stack.leftovers() == []
    assert not (stack.data / "run" / "stack.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(tmp_path: Path, tiny: str, number: signal.Signals) -> None:
    stack = Stack(tmp_path / "data", free_port_base())
    command = stack.command("dev", "up", "--port-base", str(stack.port_base), "--base", tiny)
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        # Runners that start the suite in the background leave SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        state = stack.data / "run" / "stack.json"
        wait_until(
            lambda: state.exists() and len(json.loads(state.read_bytes())["processes"]) >= 3,
            within_s=120,
            what="the start of some processes",
        )
        process.send_signal(number)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert stack.leftovers() == []


def test_a_killed_up_is_cleaned_up_by_down(tmp_path: Path, tiny: str) -> None:
    stack = Stack(tmp_path / "data", free_port_base())
    command = stack.command("dev", "up", "--port-base", str(stack.port_base), "--base", tiny)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment())
    state = stack.data / "run" / "stack.json"
    wait_until(
        lambda: state.exists() and len(json.loads(state.read_bytes())["processes"]) >= 3,
        within_s=120,
        what="the start of some processes",
    )
    process.kill()
    process.wait()
    assert stack.leftovers() != []
    assert stack.down().code == 0
    assert stack.leftovers() == []


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
