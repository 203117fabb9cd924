"""What the deployment's first job makes: usable by every service, each secret with the one who uses it, kept for ever."""

import hashlib
import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from loraport.deploy.board import acl
from loraport.deploy.credentials import Materials
from loraport.deploy.site import Site, compose_site, kubernetes_site
from loraport.dev.layout import read_endpoints
from loraport.trust.files import read_chain
from loraport.trust.root import Role
from services.executor.config import ExecutorConfig
from services.loader.config import LoaderConfig
from services.registry.config import RegistryConfig
from services.router.config import RouterConfig
from services.shared.config import load_config
from services.shared.trust import RoleSigner, TrustStore

COMPOSE = compose_site(base_model="base", executors=("executor-0", "executor-gpu-0"), public=("port.example",))
KUBERNETES = kubernetes_site(base_model="base", nodes=4, namespace="loraport", public=())
CONFIGS: dict[str, type[Any]] = {
    "registry": RegistryConfig,
    "loader": LoaderConfig,
    "router": RouterConfig,
    "executor": ExecutorConfig,
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("site", "nodes"), [(COMPOSE, False), (KUBERNETES, True)], ids=["compose", "kubernetes"])
def test_every_service_can_read_its_configuration(tmp_path: Path, site: Site, nodes: bool) -> None:
    materials = Materials(tmp_path, site, nodes=nodes)
    materials.make({"executor": {"dtype": "bfloat16"}, "loader": {"node": {"disk_budget_bytes": 5}}})
    for directory in ("registry", "loader", "router", *materials.executors):
        kind = directory if directory in CONFIGS else "executor"
        config = load_config(CONFIGS[kind], tmp_path / directory / "config.json")
        if kind == "executor":
            assert config.dtype == "bfloat16"
        if kind == "loader":  # an operator's setting lies beside what the site says
            assert config.node.disk_budget_bytes == 5
            assert config.node.handover_socket
    router = load_config(RouterConfig, tmp_path / "router" / "config.json")
    assert [executor.name for executor in router.executors] == [executor.name for executor in site.executors]


def test_the_keys_are_those_of_the_trust_root_and_lie_with_their_roles(tmp_path: Path) -> None:
    Materials(tmp_path, COMPOSE).make({})
    for directory, roles in {
        "registry": ("registry", "timestamp"),
        "loader": ("loader",),
        "router": ("router",),
    }.items():
        trust = TrustStore.load(str(tmp_path / directory))
        for role in roles:
            RoleSigner(str(tmp_path / directory / f"{role}.key"), role=role, trust=trust).require()
    holders = {name.split("/")[0] for name in files(tmp_path) if name.endswith(("root.key", "ca.key"))}
    assert holders == {"operator"}
    assert {str(role) for role in read_chain(tmp_path / "executor-0")[-1][0].roles} == {str(role) for role in Role}


def test_no_secret_is_with_somebody_else(tmp_path: Path) -> None:
    Materials(tmp_path, COMPOSE).make({})
    found = files(tmp_path)
    holders = {
        "operator/secrets/store-loader": {"operator", "store", "loader"},
        "operator/secrets/board-router": {"operator", "router"},
        "operator/secrets/board-executor": {"operator", "executor-0", "executor-gpu-0"},
        "operator/secrets/pepper": {"operator", "registry", "router"},
        "database/password": {"database", "registry"},
        "store/root-password": {"store"},
    }
    for name, allowed in holders.items():
        assert {path.split("/")[0] for path, data in found.items() if found[name] in data} == allowed, name
    for path in tmp_path.rglob("*"):
        if path.name.endswith(".root.json"):
            continue  # anybody may read it
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_executors_compute_where_their_profile_says(tmp_path: Path) -> None:
    Materials(tmp_path, COMPOSE).make({})
    configs = {
        name: json.loads((tmp_path / name / "config.json").read_bytes()) for name in ("executor-0", "executor-gpu-0")
    }
    assert {name: config["model"]["device"] for name, config in configs.items()} == {
        "executor-0": "cpu", "executor-gpu-0": "cuda",
    }  # fmt: skip


def test_a_second_run_keeps_everything_and_a_new_executor_joins(tmp_path: Path) -> None:
    one = compose_site(base_model="base", executors=("executor-0",), public=())
    Materials(tmp_path, one).make({})
    before = files(tmp_path)
    Materials(tmp_path, one).make({})
    assert files(tmp_path) == before
    Materials(tmp_path, COMPOSE).make({})
    after = files(tmp_path)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"router/config.json", "operator/endpoints.json"}


def test_certificates_and_root_are_renewed_in_time_with_the_same_keys_behind_them(tmp_path: Path) -> None:
    Materials(tmp_path, COMPOSE).make({})
    before = files(tmp_path)
    later = datetime.now(UTC) + timedelta(days=350)
    Materials(tmp_path, COMPOSE).make({}, now=later)
    after = files(tmp_path)
    assert after["router/tls.pem"] != before["router/tls.pem"]
    assert after["operator/pki/ca.key"] == before["operator/pki/ca.key"]
    assert after["router/router.key"] == before["router/router.key"]
    versions = [root.version for root, _ in read_chain(tmp_path / "router")]
    assert versions == list(range(1, len(versions) + 1))
    assert read_chain(tmp_path / "router")[-1][0].expires > later.timestamp()


@pytest.mark.parametrize(
    ("directory", "names"),
    [
        ("router", {"router", "localhost", "port.example"}),
        ("loader", {"loader", "localhost", "port.example"}),
        ("executor-0", {"executor-0", "localhost"}),
        ("database", {"database"}),
    ],
)
def test_certificates_bear_the_names_that_are_dialled(tmp_path: Path, directory: str, names: set[str]) -> None:
    Materials(tmp_path, COMPOSE).make({})
    certificate = x509.load_pem_x509_certificate((tmp_path / directory / "tls.pem").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(found.get_values_for_type(x509.DNSName)) == names
    # One identity of the fleet, or, for what is not the fleet's own, none.
    assert len(found.get_values_for_type(x509.UniformResourceIdentifier)) == (0 if directory == "database" else 1)


def test_pods_are_dialled_by_names_that_their_certificate_covers(tmp_path: Path) -> None:
    Materials(tmp_path, KUBERNETES, nodes=True).make({})
    certificate = x509.load_pem_x509_certificate((tmp_path / "executor" / "tls.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    wildcards = {name.removeprefix("*") for name in names.get_values_for_type(x509.DNSName) if name.startswith("*.")}
    router = json.loads((tmp_path / "router" / "config.json").read_bytes())
    for executor in router["executors"]:
        host = executor["address"].rsplit(":", 1)[0]
        assert host[host.index(".") :] in wildcards


def test_the_operators_directory_is_a_data_directory_of_the_command_line(tmp_path: Path) -> None:
    Materials(tmp_path, COMPOSE).make({})
    endpoints = read_endpoints(tmp_path / "operator")
    assert endpoints["registry"] == "registry:7401"
    for name in ("ca", "admin_certificate", "admin_key"):
        assert Path(endpoints["credentials"][name]).is_file()


def test_the_notice_boards_users_hold_hashes_only() -> None:
    text = acl({"router": "first-secret", "executor": "second-secret"})
    assert "secret" not in text
    for password in ("first-secret", "second-secret"):
        assert f"#{hashlib.sha256(password.encode()).hexdigest()}" in text
    assert "user default off" in text
    assert "+@all" not in text
