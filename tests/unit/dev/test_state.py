import json
import socket
from pathlib import Path

import pytest

from loraport.dev.commands import make_programs
from loraport.dev.credentials import ensure_credentials
from loraport.dev.health import accepts, describe, port_free
from loraport.dev.layout import Layout, Ports, StackError, read_endpoints
from loraport.dev.processes import ProcessRecord
from loraport.dev.stack import UpOptions, down, status, up
from loraport.dev.state import StackState, forget, locked, read_state, write_state
from tests.e2e.harness import free_port_base

RECORD = ProcessRecord(name="router", pid=123, started=1.5, port=7400)


def quiet(text: str) -> None:
    pass


def options(data: Path, **changes: object) -> UpOptions:
    return UpOptions(**{"data": data, "port_base": 7400, **changes})  # type: ignore[arg-type]


def test_ports_never_collide() -> None:
    ports = [port for _, port in Ports(7400).used(7)]
    assert len(set(ports)) == len(ports)
    assert max(ports) == 7439


def test_state_is_read_back_and_forgotten(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    assert read_state(layout) is None
    with locked(layout):
        state = StackState(port_base=7400, complete=True, processes=(RECORD,), commands={"router": ["a", "b"]})
        write_state(layout, state)
    assert read_state(layout) == state
    forget(layout)
    assert read_state(layout) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other"}', '{"schema": "loraport.stack.v1"}'])
def test_broken_state_is_no_state(tmp_path: Path, text: str) -> None:
    layout = Layout.at(tmp_path)
    layout.state.parent.mkdir()
    layout.state.write_text(text)
    assert read_state(layout) is None
    assert down(tmp_path) == []


def test_two_commands_do_not_work_on_one_stack(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    with locked(layout), pytest.raises(StackError, match="another loraport dev command"), locked(layout):
        pass


def test_without_a_stack_clients_are_told_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="loraport dev up"):
        read_endpoints(tmp_path / "nowhere")
    assert status(tmp_path) == []
    assert down(tmp_path / "nowhere") == []


def test_a_taken_port_is_named_before_anything_is_started(tmp_path: Path) -> None:
    # Not among the ports that the kernel chooses from: there a neighbour may be somebody's, and is named first.
    base = free_port_base()
    port = base + 20
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert accepts(port)
        assert not port_free(port)
        with pytest.raises(StackError, match=f"port {port} .valkey. is taken"):
            up(options(tmp_path, port_base=base), quiet)
    assert not Layout.at(tmp_path).state.exists()


@pytest.mark.parametrize("port_base", [0, 80, 65_530])
def test_port_bases_that_cannot_be_are_refused(tmp_path: Path, port_base: int) -> None:
    with pytest.raises(StackError, match="--port-base"):
        up(options(tmp_path, port_base=port_base), quiet)


def test_a_data_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StackError, match="cannot use the data directory"):
        up(options(file), quiet)


def test_progress_is_what_the_process_logged_last(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    log = layout.log("router")
    log.parent.mkdir()
    assert describe(layout, RECORD) == "router: starting"
    log.write_text(json.dumps({"event": "loading the model", "level": "info"}) + "\n")
    assert describe(layout, RECORD) == "router: loading the model"
    log.write_text("Traceback\nValueError: no\n")
    assert describe(layout, RECORD) == "router: ValueError: no"


def test_secrets_are_not_on_command_lines(tmp_path: Path, stack_plan: object) -> None:
    plan = stack_plan
    ensure_credentials(plan.layout, ["tiny-0"])  # type: ignore[attr-defined]
    programs = make_programs(plan)  # type: ignore[arg-type]
    secrets = [path.read_text().split("\n")[-1] for path in (plan.layout.data / "secrets").iterdir()]  # type: ignore[attr-defined]
    words = " ".join(word for program in programs for word in program.command)
    assert not [secret for secret in secrets if secret in words]
