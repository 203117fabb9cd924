"""Makes what proves identity in a deployment, each thing where it is used and nowhere else.

    <out>/operator/   pki/ (both CAs with their keys, the admin's certificate), trust/ (root key, roots),
                      endpoints.json: a data directory for the command line. No service sees it.
    <out>/<service>/  config.json, tls.{pem,key}, ca.pem, admin-ca.pem, N.root.json, and the service's own keys

What is there is kept; certificates are issued anew before they expire, and configurations are written every time. A
private key is made in the directory of the one who uses it. Every file can be read by its owner only.
"""

import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loraport.bundle.envelope import SigningKey, sign_envelope
from loraport.deploy.board import BOARD_CONFIG, acl
from loraport.deploy.site import (
    BOARD_USERS,
    KEYS,
    Executor,
    Site,
    endpoints,
    executor_config,
    loader_config,
    merged,
    registry_config,
    router_config,
)
from loraport.dev.credentials import RENEW_BELOW_DAYS, write_private
from loraport.dev.layout import ENDPOINTS_SCHEMA
from loraport.dev.pki import Pair, days_left, make_ca, make_leaf
from loraport.trust.edit import first_root, next_root
from loraport.trust.files import read_chain, write_root
from loraport.trust.root import PAYLOAD_TYPE, Role

TRUST_DOMAIN = "loraport.local"
# Whose key a role's is.
HOLDERS = {Role.REGISTRY: "registry", Role.TIMESTAMP: "registry", Role.LOADER: "loader", Role.ROUTER: "router"}

OTHERS = ("board", "database", "store", "grafana")

Settings = Mapping[str, Mapping[str, Any]]


class Materials:
    """The directories of one site below `out`; `nodes` puts all executors into one, for pods that are made alike."""

    def __init__(self, out: Path, site: Site, *, nodes: bool = False) -> None:
        self._out = out
        self._site = site
        self._nodes = nodes
        self._operator = out / "operator"

    @property
    def executors(self) -> dict[str, Executor]:
        """Directory → the executor whose it is."""
        if self._nodes:
            return {"executor": self._site.executors[0]}
        return {executor.name: executor for executor in self._site.executors}

    def make(self, settings: Settings, *, now: datetime | None = None) -> None:
        """Makes what is missing.

        Raises:
            OSError: a file cannot be written.
            ValueError: the trust root cannot be renewed here.
        """
        now = now or datetime.now(UTC)
        for name in ("operator", "registry", "loader", "router", *OTHERS, *self.executors):
            (self._out / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("pki", "trust", "keys", "signers", "secrets", "state"):
            (self._operator / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._certificates(now)
        self._roots(now)
        passwords = self._secrets()
        self._configurations(settings, passwords)

    def _certificates(self, now: datetime) -> None:
        services = self._authority("ca", "loraport services", now)
        admins = self._authority("admin-ca", "loraport admins", now)
        hosts = self._site.hosts
        for role in ("registry", "loader", "router"):
            doors = (*hosts[role], *hosts.get(f"{role}-admin", ()))
            self._leaf(role, services, f"service/{role}", doors, now)
        for directory, executor in self.executors.items():
            path = "service/executor" if self._nodes else f"service/executor/{executor.name}"
            self._leaf(directory, services, path, (*executor.hosts, "localhost"), now)
        # Not of the fleet's: a name for TLS, without an identity that a service would take.
        self._leaf("database", services, "", hosts["database"], now)
        pki = self._operator / "pki"
        self._pair(pki / "admin.pem", pki / "admin.key", admins, "admin/operator", ("localhost",), now)
        for directory in ("registry", "loader", "router", "database", *self.executors):
            for name in ("ca", "admin-ca"):
                write_private(self._out / directory / f"{name}.pem", (pki / f"{name}.pem").read_bytes())

    def _authority(self, name: str, common_name: str, now: datetime) -> Pair:
        certificate, key = (self._operator / "pki" / f"{name}.{end}" for end in ("pem", "key"))
        if not certificate.exists() or not key.exists():
            pair = make_ca(common_name)
            write_private(key, pair.key)
            write_private(certificate, pair.certificate)
        elif days_left(certificate.read_bytes(), now=now) < RENEW_BELOW_DAYS:
            raise ValueError(
                f"{certificate} expires soon; a new CA needs new certificates everywhere: see operations.md"
            )
        return Pair(certificate.read_bytes(), key.read_bytes())

    def _leaf(self, directory: str, ca: Pair, path: str, hosts: tuple[str, ...], now: datetime) -> None:
        folder = self._out / directory
        self._pair(folder / "tls.pem", folder / "tls.key", ca, path, hosts, now)

    @staticmethod
    def _pair(certificate: Path, key: Path, ca: Pair, path: str, hosts: tuple[str, ...], now: datetime) -> None:
        if certificate.exists() and key.exists() and days_left(certificate.read_bytes(), now=now) > RENEW_BELOW_DAYS:
            return
        uri = f"spiffe://{TRUST_DOMAIN}/{path}" if path else ()
        pair = make_leaf(ca, uri=uri, dns=tuple(dict.fromkeys(hosts)), ips=("127.0.0.1",))
        write_private(key, pair.key)
        write_private(certificate, pair.certificate)

    def _roots(self, now: datetime) -> None:
        trust, seconds = self._operator / "trust", int(now.timestamp())
        if not any(trust.glob("*.root.json")):
            places = {role: self._out / holder / f"{role}.key" for role, holder in HOLDERS.items()}
            places[Role.ROOT] = trust / "root.key"
            keys = {role: _signing_key(places[role]) for role in Role}
            root = first_root({role: [key.public_pem] for role, key in keys.items()}, now=seconds)
            write_root(trust, root, sign_envelope(PAYLOAD_TYPE, root.body(), keys[Role.ROOT]))
        newest = read_chain(trust)[-1][0]
        if (newest.expires - seconds) / 86400 < RENEW_BELOW_DAYS:
            found = [SigningKey.load(path) for path in sorted(trust.glob("root*.key"))]
            holders = [key for key in found if key.key_id in newest.roles[Role.ROOT].key_ids]
            if len(holders) < newest.roles[Role.ROOT].threshold:
                raise ValueError("the trust root expires soon; sign a new one: loraport trust rotate --draft FILE")
            renewed = next_root(newest, now=seconds)
            write_root(trust, renewed, sign_envelope(PAYLOAD_TYPE, renewed.body(), holders))
        for directory in ("registry", "loader", "router", *self.executors):
            for path in trust.glob("*.root.json"):
                write_private(self._out / directory / path.name, path.read_bytes())

    def _secrets(self) -> dict[str, str]:
        """Makes the shared secrets and returns the notice board's passwords."""
        out, vault = self._out, self._operator / "secrets"
        pepper = _secret(vault / "pepper")
        for directory in ("registry", "router"):
            write_private(out / directory / "pepper", pepper.encode())
        database = _secret(out / "database" / "password")
        host, port = self._site.database.rsplit(":", 1)
        write_private(out / "registry" / "pgpass", f"{host}:{port}:loraport:loraport:{database}\n".encode())
        for path in (out / "store" / "root-password", out / "grafana" / "admin-password"):
            _secret(path)
        write_private(out / "store" / "root-user", b"loraport-root")
        loader = f"loraport-loader\n{_secret(vault / 'store-loader')}"
        for path in (out / "store" / "loader", out / "loader" / "s3"):
            write_private(path, loader.encode())
        passwords = {user: _secret(vault / f"board-{user}") for user in BOARD_USERS}
        write_private(out / "board" / "users.acl", acl(passwords).encode())
        write_private(out / "board" / "board.conf", BOARD_CONFIG.format(keys=KEYS).encode())
        return passwords

    def _configurations(self, settings: Settings, passwords: Mapping[str, str]) -> None:
        site = self._site
        # A pod learns its own name when it starts; `install` puts it in.
        name = "$POD_NAME" if self._nodes else None
        configs = {
            "registry": ("registry", registry_config(site)),
            "loader": ("loader", loader_config(site, name=name or "loader")),
            "router": ("router", router_config(site, board_password=passwords["router"])),
        }
        for directory, executor in self.executors.items():
            config = executor_config(site, executor, name=name or executor.name, board_password=passwords["executor"])
            configs[directory] = ("executor", config)
        for directory, (kind, config) in configs.items():
            whole = merged(config, settings.get(kind, {}))
            write_private(self._out / directory / "config.json", json.dumps(whole, indent=1).encode())
        found = {"schema": ENDPOINTS_SCHEMA, **endpoints(site)}
        write_private(self._operator / "endpoints.json", json.dumps(found, indent=1).encode())


def _signing_key(path: Path) -> SigningKey:
    if not path.exists():
        SigningKey.generate().save(path)
    return SigningKey.load(path)


def _secret(path: Path) -> str:
    if not path.exists():
        write_private(path, secrets.token_hex(32).encode())
    return path.read_text()
