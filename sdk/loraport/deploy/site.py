"""Where the services of a deployment are, and the configuration that follows from it for each of them.

A site is a fleet on other machines than the operator's: containers of one host, or pods. Every service finds its files
in one flat directory (`KEYS`), so that a volume of files and a Kubernetes Secret look alike to it. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# In a service's container: its own keys and configuration, its state, the base model, the hand-over socket's directory.
KEYS = "/run/loraport"
STATE = "/var/lib/loraport"
BASE = "/base"
HANDOVER = "/run/handover"

ANY = "0.0.0.0"  # noqa: S104 - in a container, whose networks are closed; every port asks for an identity
REGISTRY, LOADER, LOADER_UPLOAD, EXECUTOR, ROUTER, ROUTER_ADMIN = 7401, 7402, 7412, 7403, 7400, 7410
METRICS, LOADER_METRICS = 9464, 9465
BOARD_USERS = ("router", "executor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """An executor: its id, its address for the router, where it finds its loader, and the names in its certificate;
    `device` is `cpu` or `cuda`."""

    name: str
    address: str
    loader_address: str
    hosts: tuple[str, ...]
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One deployment. `hosts` are the names under which a service is reached, for its certificate."""

    base_model: str
    executors: tuple[Executor, ...]
    hosts: Mapping[str, tuple[str, ...]]
    database: str
    board: str
    store: str
    # Services' own metrics are shown, for a Prometheus that fetches them; else they are only sent.
    shows_metrics: bool = False

    def host(self, service: str) -> str:
        """Returns the first name of a service."""
        return self.hosts[service][0]


def compose_site(*, base_model: str, executors: tuple[str, ...], public: tuple[str, ...]) -> Site:
    """Returns the site of `deploy/compose.yaml`: every service is reached under its own name on the networks.

    `public` are further names of the host, for the two doors that are published. Executors of the profile `gpu` have
    it in their names.
    """
    doors = ("localhost", *public)
    return Site(
        base_model=base_model,
        executors=tuple(
            Executor(
                name=name,
                address=f"{name}:{EXECUTOR}",
                loader_address=f"loader:{LOADER}",
                hosts=(name,),
                device="cuda" if name.startswith("executor-gpu-") else "cpu",
            )
            for name in executors
        ),
        hosts={
            "registry": ("registry", *doors),
            "loader": ("loader", *doors),
            "router": ("router", *doors),
            "router-admin": ("router",),
            "database": ("database",),
        },
        database="database:5432",
        board="board:6379",
        store="store:9000",
    )


def kubernetes_site(*, base_model: str, nodes: int, namespace: str, public: tuple[str, ...]) -> Site:
    """Returns the site of `deploy/kubernetes`: `nodes` pods at most, each an executor and its loader.

    The router knows all that there may be; those that are not there yet are not placed on.
    """

    def names(service: str) -> tuple[str, ...]:
        return (f"{service}.{namespace}.svc.cluster.local", f"{service}.{namespace}.svc", service, "localhost", *public)

    pods = f"nodes.{namespace}.svc.cluster.local"
    return Site(
        base_model=base_model,
        executors=tuple(
            Executor(
                name=f"node-{index}",
                address=f"node-{index}.{pods}:{EXECUTOR}",
                loader_address=f"localhost:{LOADER}",
                hosts=(f"*.{pods}", "localhost"),
            )
            for index in range(nodes)
        ),
        hosts={
            "registry": names("registry"),
            "loader": (*names("loader"), f"*.{pods}"),
            "router": names("router"),
            "router-admin": names("router-admin"),
            "database": names("database"),
        },
        database=f"database.{namespace}.svc.cluster.local:5432",
        board=f"board.{namespace}.svc.cluster.local:6379",
        store=f"store.{namespace}.svc.cluster.local:9000",
        shows_metrics=True,
    )


def _tls() -> dict[str, str]:
    return {
        "certificate": f"{KEYS}/tls.pem",
        "key": f"{KEYS}/tls.key",
        "service_ca": f"{KEYS}/ca.pem",
        "admin_ca": f"{KEYS}/admin-ca.pem",
    }


def _telemetry(site: Site, port: int = METRICS) -> dict[str, str]:
    return {"metrics_listen": f"{ANY}:{port}" if site.shows_metrics else ""}


def registry_config(site: Site) -> dict[str, Any]:
    """Returns the registry's configuration. The database's password is in a file that its URL names."""
    options = f"passfile={KEYS}/pgpass&sslmode=verify-full&sslrootcert={KEYS}/ca.pem"
    return {
        "listen": f"{ANY}:{REGISTRY}",
        "database_url": f"postgresql+psycopg://loraport@{site.database}/loraport?{options}",
        "tls": _tls(),
        "trust_dir": KEYS,
        "signing_key_file": f"{KEYS}/registry.key",
        "timestamp_key_file": f"{KEYS}/timestamp.key",
        "state_file": f"{STATE}/signed.json",
        "pepper_file": f"{KEYS}/pepper",
        "telemetry": _telemetry(site),
    }


def loader_config(site: Site, *, name: str = "loader") -> dict[str, Any]:
    """Returns a loader's configuration. It alone has the store's credentials, and it alone may be given sources."""
    return {
        "name": name,
        "listen": f"{ANY}:{LOADER}",
        "upload_listen": f"{ANY}:{LOADER_UPLOAD}",
        "tls": _tls(),
        "trust_dir": KEYS,
        "signing_key": f"{KEYS}/loader.key",
        "registry_address": f"{site.host('registry')}:{REGISTRY}",
        "checkpoint": {"state_file": f"{STATE}/floor.json"},
        "s3_endpoint": site.store,
        "s3_credentials": f"{KEYS}/s3",
        "spool_dir": STATE,
        "node": {"handover_socket": f"{HANDOVER}/host.sock", "disk_dir": f"{STATE}/disk"},
        # In a pod it shares its address with the executor.
        "telemetry": _telemetry(site, LOADER_METRICS),
    }


def router_config(site: Site, *, board_password: str) -> dict[str, Any]:
    """Returns the router's configuration, which holds the notice board's password."""
    return {
        "user_address": f"{ANY}:{ROUTER}",
        "admin_address": f"{ANY}:{ROUTER_ADMIN}",
        "registry_address": f"{site.host('registry')}:{REGISTRY}",
        "executors": [
            {"name": executor.name, "address": executor.address, "base_model": site.base_model}
            for executor in site.executors
        ],
        "tokenizers": {site.base_model: BASE},
        "tls": _tls(),
        "trust_dir": KEYS,
        "signing_key": f"{KEYS}/router.key",
        "root_state_file": f"{STATE}/roots.json",
        "pepper_file": f"{KEYS}/pepper",
        "valkey_url": f"valkey://router:{board_password}@{site.board}/0",
        # An executor that ended is started again; a request may wait for that.
        "executor_wait_s": 30.0,
        "telemetry": _telemetry(site),
    }


def executor_config(site: Site, executor: Executor, *, name: str, board_password: str) -> dict[str, Any]:
    """Returns an executor's configuration, which holds the notice board's password."""
    return {
        "name": name,
        "listen": f"{ANY}:{EXECUTOR}",
        "base_dir": BASE,
        "base_model": site.base_model,
        "model": {"device": executor.device},
        "tls": _tls(),
        "trust_dir": KEYS,
        "registry_address": f"{site.host('registry')}:{REGISTRY}",
        "checkpoint": {"state_file": f"{STATE}/floor.json"},
        "loader_address": executor.loader_address,
        "valkey_url": f"valkey://executor:{board_password}@{site.board}/0",
        "telemetry": _telemetry(site),
    }


def endpoints(site: Site) -> dict[str, Any]:
    """Returns what the command line needs to find the site; credential paths are relative to its data directory."""
    return {
        "router": f"{site.host('router')}:{ROUTER}",
        "router_admin": f"{site.host('router-admin')}:{ROUTER_ADMIN}",
        "registry": f"{site.host('registry')}:{REGISTRY}",
        "loader": f"{site.host('loader')}:{LOADER}",
        "loader_upload": f"{site.host('loader')}:{LOADER_UPLOAD}",
        "executors": {executor.name: executor.address for executor in site.executors},
        "valkey": site.board,
        "s3": f"http://{site.store}",
        "bases": {site.base_model: BASE},
        "dtype": "",
        "dedicated": False,
        "credentials": {
            "ca": "pki/ca.pem",
            "admin_certificate": "pki/admin.pem",
            "admin_key": "pki/admin.key",
            "api_keys": "keys",
            "signers": "signers",
        },
    }


def merged(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` with an operator's own settings laid over it, object by object."""
    result = dict(config)
    for key, value in settings.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both and old is not None else value
    return result
