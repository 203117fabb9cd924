"""The rules that deploy/compose.yaml keeps, whoever adds a service to it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
FLEET = ("registry", "loader", "router", "executor-0", "executor-gpu-0")
OTHERS = ("database", "store", "board")
JOBS = ("init", "store-setup", "base-setup", "operator")
# Their images hold nothing that could ask them.
SILENT = ("collector", "tempo")
OBSERVERS = tuple(name for name, service in SERVICES.items() if "observability" in service.get("profiles", ()))

each = pytest.mark.parametrize("name", SERVICES)


def volumes(name: str) -> list[tuple[str, str, bool]]:
    """Returns (source, target, read-only) of a service's volumes."""
    found = []
    for volume in SERVICES[name].get("volumes", ()):
        if isinstance(volume, dict):
            found.append((volume["source"], volume["target"], volume.get("read_only", False)))
        else:
            source, target, *mode = re.match(r"(\$\{.*?\}|[^:]*):([^:]*):?(.*)", volume).groups()
            found.append((source, target, mode == ["ro"]))
    return found


def test_the_parts_are_all_there() -> None:
    assert set(SERVICES) == {*FLEET, *OTHERS, *JOBS, *OBSERVERS}


@each
def test_nobody_may_do_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"]
    assert service["mem_limit"]
    assert service["cpus"]
    assert service["init"] is True
    assert service.get("network_mode", "none") == "none"
    for entry in service["tmpfs"]:
        assert {"nosuid", "nodev"} <= set(entry.split(":", 1)[1].split(","))
        assert "noexec" in entry or entry.startswith("/run/triton"), entry
    assert not [source for source, _, _ in volumes(name) if "docker.sock" in source or source.startswith("/")]


@each
def test_every_image_is_a_variable_with_a_pinned_default(name: str) -> None:
    match = re.fullmatch(r"\$\{LORAPORT_[A-Z0-9_]+_IMAGE:-([^}]+)\}", SERVICES[name]["image"])
    assert match, SERVICES[name]["image"]
    tag = match[1].rpartition(":")[2]
    assert re.search(r"\d+\.\d+|RELEASE\.", tag), match[1]


@each
def test_no_secret_is_in_an_environment(name: str) -> None:
    environment = SERVICES[name].get("environment", {})
    for key, value in environment.items():
        secret = re.search(r"PASSWORD|SECRET|TOKEN|USER_FILE|PEPPER|KEY$", key)
        assert not secret or str(value).startswith("/run/loraport/"), key


@pytest.mark.parametrize("name", [*FLEET, *OTHERS, *OBSERVERS])
def test_what_goes_on_running_has_a_health_check_and_comes_back(name: str) -> None:
    assert name in SILENT or SERVICES[name]["healthcheck"]["test"]
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_only_the_loader_has_a_way_out() -> None:
    networks = FILE["networks"]
    closed = {name for name, network in networks.items() if (network or {}).get("internal")}
    silent = {
        name
        for name, network in networks.items()
        if (network or {}).get("driver_opts", {}).get("com.docker.network.bridge.enable_ip_masquerade") == "false"
    }
    assert set(networks) - closed - silent == {"egress"}
    assert [name for name, service in SERVICES.items() if "egress" in service.get("networks", ())] == ["loader"]
    assert all(service.get("networks") or service.get("network_mode") == "none" for service in SERVICES.values())


def test_the_loaders_default_route_is_the_way_out() -> None:
    open_ = [name for name in SERVICES["loader"]["networks"] if not (FILE["networks"][name] or {}).get("internal")]
    assert min(open_) == "egress", "an engine takes the first by name"


def test_files_that_are_mounted_are_there() -> None:
    for name in OBSERVERS:
        for source, _, _ in volumes(name):
            assert not source.startswith("./") or (ROOT / "deploy" / source).exists(), source


def test_storage_is_reached_only_by_the_one_that_it_is_for() -> None:
    members = {
        network: {name for name, service in SERVICES.items() if network in service.get("networks", ())}
        for network in FILE["networks"]
    }
    assert members["database"] == {"database", "registry"}
    assert members["store"] == {"store", "store-setup", "loader"}
    assert members["board"] == {"board", "router", "executor-0", "executor-gpu-0"}
    assert members["edge"] == {"router"}
    assert members["telemetry"] == {*FLEET, *OBSERVERS}
    assert members["control"] == {*FLEET, "base-setup", "operator"}


def test_keys_are_mounted_by_their_owner_alone_and_read_only() -> None:
    for name in SERVICES:
        for source, target, read_only in volumes(name):
            if source.startswith("keys-") and name != "init":
                assert source in (f"keys-{name}", f"keys-{name.removesuffix('-setup')}")
                assert target == "/run/loraport"
                assert read_only
            if source == "operator" and name not in ("init", "operator"):
                assert (name, read_only) == ("base-setup", True)
    assert SERVICES["init"]["network_mode"] == "none"


def test_published_ports_are_on_the_loopback_unless_somebody_says_otherwise() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"registry", "loader", "router", *(name for name in OBSERVERS if name in published)}
    for ports in published.values():
        assert all(re.match(r"\$\{LORAPORT_(ADMIN_)?BIND:-127\.0\.0\.1\}:", port) for port in ports)
