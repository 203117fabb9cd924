"""Waits until the processes of a stack are ready, and says meanwhile what they do."""

import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from loraport.dev.layout import HOST, Layout, StackError
from loraport.dev.processes import ProcessRecord, exit_code, find, last_line

POLL_S = 0.1
# A process that is busy loading may accept a connection and answer nothing; what it does is to be shown meanwhile.
PROBE_TIMEOUT_S = 0.5
# Serialized HealthCheckResponse{status: SERVING}; the request is empty.
SERVING = b"\x08\x01"


def port_free(port: int) -> bool:
    """Says whether this machine's loopback port can be listened on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free, one that is listened on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Says whether something accepts connections on a loopback port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        return probe.connect_ex((HOST, port)) == 0


class HealthProbe:
    """Asks services for their health under the stack's admin identity."""

    def __init__(self, layout: Layout, *, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._credentials = grpc.ssl_channel_credentials(
            layout.certificate("ca").read_bytes(),
            layout.private_key("admin").read_bytes(),
            layout.certificate("admin").read_bytes(),
        )
        self._channels: dict[int, grpc.Channel] = {}
        self._timeout_s = timeout_s

    def serving(self, port: int) -> bool:
        """Says whether the service on a port answers SERVING."""
        if not accepts(port):
            return False
        channel = self._channels.get(port)
        if channel is None:
            options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.secure_channel(f"{HOST}:{port}", self._credentials, options=options)
            self._channels[port] = channel
        check = channel.unary_unary("/grpc.health.v1.Health/Check", _same, _same)
        try:
            return bytes(check(b"", timeout=self._timeout_s)) == SERVING
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            channel.close()


def wait_ready(
    layout: Layout,
    records: Sequence[ProcessRecord],
    ready: Callable[[ProcessRecord], bool],
    progress: Callable[[str], None],
    *,
    timeout_s: float,
) -> None:
    """Waits until all processes are ready.

    Raises:
        StackError: one of them ended, or was not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(records)
    while waiting:
        for record in list(waiting):
            if find(record) is None:
                raise StackError(_why_ended(layout, record))
            progress(describe(layout, waiting[-1]))
            if ready(record):
                waiting.remove(record)
        if waiting:
            if time.monotonic() > deadline:
                log = layout.log(waiting[-1].name)
                raise StackError(f"{waiting[-1].name} was not ready after {timeout_s:.0f} s; see {log}")
            time.sleep(POLL_S)


def describe(layout: Layout, record: ProcessRecord) -> str:
    """Returns a line that says what a process does now, from its own log."""
    return f"{record.name}: {_event(last_line(layout.log(record.name))) or 'starting'}"


def _why_ended(layout: Layout, record: ProcessRecord) -> str:
    code = exit_code(record)
    how = "" if code is None else f" with exit code {code}"
    log = layout.log(record.name)
    last = _event(last_line(log)) or "it wrote nothing"
    return f"{record.name} ended{how} while the stack came up: {last.removeprefix(f'{record.name}: ')}; see {log}"


def _event(line: str) -> str:
    """Returns the event of a structured log line, or the line itself, shortened."""
    try:
        value: Any = json.loads(line)
    except ValueError:
        return line[:300]
    return str(value.get("event", ""))[:300] if isinstance(value, dict) else line[:300]


def _same(data: bytes) -> bytes:
    return data
