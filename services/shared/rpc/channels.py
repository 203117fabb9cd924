"""Client channels between services: mTLS, keepalive, one wait rule."""

from dataclasses import dataclass
from pathlib import Path

import grpc

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 8 << 20),
    # A channel must not be shared with another identity by grpc's global subchannel pool.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of a service's identity: its certificate and key, and the two CA certificates, all PEM."""

    certificate: str
    key: str
    service_ca: str
    admin_ca: str

    def read(self) -> tuple[bytes, bytes]:
        """Returns (key, certificate). Raises OSError."""
        return Path(self.key).read_bytes(), Path(self.certificate).read_bytes()


def peer_channel(address: str, tls: TlsFiles) -> grpc.aio.Channel:
    """Returns a channel to a peer service under this service's identity. Raises OSError."""
    key, certificate = tls.read()
    credentials = grpc.ssl_channel_credentials(Path(tls.service_ca).read_bytes(), key, certificate)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
