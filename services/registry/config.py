"""What a registry process is told when it starts."""

from dataclasses import dataclass, field

from loraport.log.checkpoint import MAX_LIFE_S
from services.shared.rpc.channels import TlsFiles
from services.shared.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Configuration of the registry. Paths are relative to the working directory unless absolute."""

    # host:port of the one listener (mTLS; admins and peers). Port 0 takes a free one.
    listen: str
    # SQLAlchemy URL: sqlite:////abs/path/registry.db or postgresql+psycopg://user@host/db.
    database_url: str
    # This service's certificate and key and the two CAs.
    tls: TlsFiles
    # Directory of trust roots, where the first one is believed (services.shared.trust).
    trust_dir: str
    # Signer of the role registry: a key file `<name>.key`, beside which `<name>.*.key` may hold the next key, or
    # another signer (loraport.trust.signers). The newest trust root must name the key.
    signing_key_file: str
    # The fleet's pepper, at least 32 bytes, used as they are: keys the hashes of API keys and seals page tokens.
    pepper_file: str
    # Signer of the role timestamp, which signs checkpoints. Empty: the registry's, where the root names that.
    timestamp_key_file: str = ""
    # How long an upload may begin after its revision was announced, seconds, in [60, 86400].
    session_life_s: int = 3600
    # How long the result of a request id is remembered, seconds, >= 60.
    request_life_s: int = 7 * 86400
    # How often the epoch is read from the database, for changes made by another registry, seconds, > 0.
    poll_interval_s: float = 1.0
    # How long a checkpoint is good for, seconds, at most 600, and how often a new one is made, seconds, less than that.
    checkpoint_life_s: int = 600
    checkpoint_interval_s: float = 120.0
    # File that keeps the newest checkpoint that was signed over restarts, not beside the database if that can be: a
    # database that no longer yields it was changed. Empty: a restart forgets it.
    state_file: str = ""
    # How often running rollouts are looked at for what time alone decides, seconds, > 0.
    rollout_interval_s: float = 0.25
    # How long running calls may take to end on SIGTERM, seconds, >= 0.
    drain_s: float = 10.0
    # Largest weights file that may be announced, bytes.
    max_weights_bytes: int = 1 << 30
    # Highest rank that may be announced.
    max_rank: int = 256
    # Metrics and traces.
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        if not 60 <= self.session_life_s <= 86400:
            raise ValueError("session_life_s must be in [60, 86400]")
        if self.request_life_s < 60:
            raise ValueError("request_life_s must be at least 60")
        if self.poll_interval_s <= 0 or self.rollout_interval_s <= 0 or self.drain_s < 0:
            raise ValueError("poll_interval_s and rollout_interval_s must be above 0 and drain_s not below 0")
        if not 0 < self.checkpoint_interval_s < self.checkpoint_life_s <= MAX_LIFE_S:
            raise ValueError(
                f"checkpoint_interval_s must be above 0 and below checkpoint_life_s, that at most {MAX_LIFE_S}"
            )
        if self.max_weights_bytes < 1 or self.max_rank < 1:
            raise ValueError("max_weights_bytes and max_rank must be positive")
