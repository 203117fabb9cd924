"""Where a local stack keeps its things, and on which ports it listens.

    <data>/pki/       ca.pem, admin-ca.pem, <name>.{pem,key}     <data>/run/      stack.json, lock, <name>.json
    <data>/trust/     N.root.json, <role>.key, <role>.*.key      <data>/logs/     <name>.log
    <data>/secrets/   pepper, s3, valkey                         <data>/registry/ registry.db
    <data>/keys/      <tenant>.key                               <data>/s3/       the buckets
    <data>/signers/   <tenant>/<signer>.key                      <data>/bases/    <base>/
    <data>/endpoints.json                                        <data>/run/host.sock   the loader's hand-over socket
    <data>/state/     <process>.json: floors of checkpoints

Pure: nothing here touches the file system except `read_endpoints`.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
DEFAULT_DATA = ".loraport"
DEFAULT_PORT_BASE = 7400
MAX_EXECUTORS = 7
ENDPOINTS_SCHEMA = "loraport.endpoints.v1"


def default_data() -> Path:
    """Returns where the local stack is when nobody says: `LORAPORT_DATA`, else `.loraport`. The CLI looks there too."""
    return Path(os.environ.get("LORAPORT_DATA") or DEFAULT_DATA)


class StackError(Exception):
    """A local stack that cannot be started, found or used; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one stack: `base` to `base` + 39."""

    base: int

    @property
    def router(self) -> int:
        """User plane."""
        return self.base

    @property
    def registry(self) -> int:
        """Admin and peer plane."""
        return self.base + 1

    @property
    def loader(self) -> int:
        """Peer plane."""
        return self.base + 2

    def executor(self, index: int) -> int:
        """Peer plane of the executor `index`, in [0, 7)."""
        return self.base + 3 + index

    @property
    def router_admin(self) -> int:
        """Admin plane."""
        return self.base + 10

    @property
    def loader_upload(self) -> int:
        """Uploads with a session."""
        return self.base + 12

    @property
    def valkey(self) -> int:
        """Notice board."""
        return self.base + 20

    @property
    def s3(self) -> int:
        """Object store."""
        return self.base + 21

    def metrics(self, port: int) -> int:
        """Prometheus endpoint of the service whose first port is `port`."""
        return port + 30

    def used(self, executors: int) -> Iterator[tuple[str, int]]:
        """Yields (what, port) of everything that a stack with so many executors listens on."""
        yield "router", self.router
        yield "registry", self.registry
        yield "loader", self.loader
        for index in range(executors):
            yield f"executor {index}", self.executor(index)
        yield "router admin", self.router_admin
        yield "loader upload", self.loader_upload
        yield "valkey", self.valkey
        yield "s3", self.s3
        for port in (self.router, self.registry, self.loader, *map(self.executor, range(executors))):
            yield "metrics", self.metrics(port)


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths under one data directory, which is absolute."""

    data: Path

    @classmethod
    def at(cls, data: str | Path) -> "Layout":
        """Returns the layout of a data directory given by any path."""
        return cls(Path(data).expanduser().absolute())

    def certificate(self, name: str) -> Path:
        """Certificate of a service, of `admin`, or of a CA (`ca`, `admin-ca`)."""
        return self.data / "pki" / f"{name}.pem"

    def private_key(self, name: str) -> Path:
        """Private key that belongs to `certificate(name)`."""
        return self.data / "pki" / f"{name}.key"

    @property
    def trust(self) -> Path:
        """Trust roots, and in a local stack all roles' private keys, that of the role root too."""
        return self.data / "trust"

    def secret(self, name: str) -> Path:
        """A secret that two processes share."""
        return self.data / "secrets" / name

    def api_key(self, tenant: str) -> Path:
        """API key that the CLI made for a tenant."""
        return self.data / "keys" / f"{tenant}.key"

    def signer_key(self, tenant: str, signer: str) -> Path:
        """Private key of a tenant's signer."""
        return self.data / "signers" / tenant / f"{signer}.key"

    def base(self, name: str) -> Path:
        """Directory of a base model that the stack converted itself."""
        return self.data / "bases" / name

    def log(self, process: str) -> Path:
        """Log of a process."""
        return self.data / "logs" / f"{process}.log"

    def config(self, process: str) -> Path:
        """Configuration of a service process."""
        return self.data / "run" / f"{process}.json"

    def floor(self, process: str) -> Path:
        """What a process remembers of the registry's log over restarts, so that it cannot be told an older story."""
        return self.data / "state" / f"{process}.json"

    def roots(self, process: str) -> Path:
        """The trust roots that a process has accepted."""
        return self.data / "state" / f"{process}.roots.json"

    @property
    def state(self) -> Path:
        """What runs: written by `up`, removed by `down`."""
        return self.data / "run" / "stack.json"

    @property
    def lock(self) -> Path:
        """Held while a stack comes up or goes down."""
        return self.data / "run" / "lock"

    @property
    def endpoints(self) -> Path:
        """Where clients find the stack."""
        return self.data / "endpoints.json"


def read_endpoints(data: str | Path) -> dict[str, Any]:
    """Returns the endpoints of the stack at `data`, its credential paths made absolute.

    Raises:
        StackError: there is no stack, or its file is not readable.
    """
    layout = Layout.at(data)
    try:
        value = json.loads(layout.endpoints.read_bytes())
    except FileNotFoundError:
        raise StackError(f"no local stack at {data}; start one with: loraport dev up --data {data}") from None
    except (OSError, ValueError) as error:
        raise StackError(f"cannot read {layout.endpoints}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(value, dict) or value.get("schema") != ENDPOINTS_SCHEMA:
        raise StackError(f"{layout.endpoints} is not of this version; run: loraport dev up --data {data}")
    value["credentials"] = {name: str(layout.data / path) for name, path in value["credentials"].items()}
    return value
