"""`python -m loraport.deploy.probe PORT`: exit code 0 while the service on a port of this host says SERVING.

What a container's health check and a pod's probes run. The service's own certificate is shown where a client
certificate is asked for; health answers anybody.
"""

import sys
from pathlib import Path

import grpc

from loraport.deploy.site import KEYS

TIMEOUT_S = 3.0
# Serialized HealthCheckResponse{status: SERVING}; the request is empty.
SERVING = b"\x08\x01"


def serving(address: str, directory: Path, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Says whether the service at `address` is serving; `directory` holds `ca.pem`, `tls.pem` and `tls.key`."""
    credentials = grpc.ssl_channel_credentials(
        *((directory / name).read_bytes() for name in ("ca.pem", "tls.key", "tls.pem"))
    )
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(address, credentials, options=options) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", _same, _same)
        try:
            return bytes(check(b"", timeout=timeout_s)) == SERVING
        except grpc.RpcError:
            return False


def _same(data: bytes) -> bytes:
    return data


def main() -> int:
    """Asks once. Exit code 1: not serving; 2: wrong use."""
    if len(sys.argv) not in (2, 3) or not sys.argv[1].isdigit():
        sys.stderr.write("usage: python -m loraport.deploy.probe PORT [DIRECTORY]\n")
        return 2
    directory = Path(sys.argv[2] if len(sys.argv) == 3 else KEYS)
    return 0 if serving(f"localhost:{sys.argv[1]}", directory) else 1


if __name__ == "__main__":
    sys.exit(main())
