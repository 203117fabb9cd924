"""The router's configuration."""

from dataclasses import dataclass, field

from services.router.issuers import TokenIssuer
from services.shared.rpc.channels import TlsFiles
from services.shared.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True)
class ExecutorAddress:
    """An executor that the router may send to: its name, where it listens, the id of its base model."""

    name: str
    address: str
    base_model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeLimits:
    """How long things may take. Times in seconds."""

    # Longest life of a request, whatever its deadline.
    max_request_s: float = 600.0
    # A caller that does not take what is ready for so long has gone; its place goes to others.
    max_unread_s: float = 10.0
    # How long running requests may take to end when the router stops.
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        if min(self.max_request_s, self.max_unread_s) <= 0 or self.drain_s < 0:
            raise ValueError("life.max_request_s and life.max_unread_s are above 0, life.drain_s is not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What an answer must keep to count as a good one in metrics and `report cost`. Times in seconds."""

    # From the request's arrival to its first token.
    first_token_s: float = 5.0
    # Mean time between tokens.
    token_s: float = 0.25

    def __post_init__(self) -> None:
        if min(self.first_token_s, self.token_s) <= 0:
            raise ValueError("objectives are above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What one router needs to know. Addresses are `host:port`, times are seconds."""

    # The door for end users: TLS, API keys.
    user_address: str
    # The admin plane: mTLS, admin identities.
    admin_address: str
    registry_address: str
    # May be empty; executors need not be up.
    executors: tuple[ExecutorAddress, ...]
    # Base model id → directory with its tokenizer.json and tokenizer_config.json.
    tokenizers: dict[str, str]
    tls: TlsFiles
    # Directory of trust roots, where the first one is believed; see services/shared/trust.py.
    trust_dir: str
    # Signer of tickets: a key file `<name>.key`, beside which `<name>.*.key` may hold the next key, or another signer
    # (loraport.trust.signers). The newest trust root must name the key.
    signing_key: str
    # Secret under which API keys are hashed, shared with the registry: the file's bytes as they are, at least 32.
    pepper_file: str
    # Who else's tokens open the users' door, besides API keys; see services/router/issuers.py.
    token_issuers: tuple[TokenIssuer, ...] = ()
    # File that keeps the accepted trust roots over restarts; empty: a restart begins with `trust_dir` again.
    root_state_file: str = ""
    # The notice board; empty for none. Losing it only makes residency up to `poll_interval_s` older.
    valkey_url: str = ""
    # Most requests of one tenant that wait, and that run at once.
    max_queued: int = 256
    max_running: int = 64
    # Longest stay in a queue, then OVERLOADED.
    queue_residence_s: float = 30.0
    # How long a request waits while no executor of its base serves, then EXECUTOR_UNAVAILABLE.
    executor_wait_s: float = 2.0
    # Most answers awaited from one executor (a request has `n` of them); what is over it waits here, where it is
    # ordered fairly.
    executor_window: int = 32
    # Answers beyond that, for tenants that have less than an equal part of an executor's: one tenant's long answers
    # never hold all places. An executor has rows for both.
    reserved_places: int = 4
    # Limits of a request, besides the model's context.
    max_prompt_tokens: int = 131_072
    max_tokens: int = 4096
    life: LifeLimits = field(default_factory=LifeLimits)
    # How often every executor is asked for its state.
    poll_interval_s: float = 1.0
    # What counts as a good answer.
    objectives: Objectives = field(default_factory=Objectives)
    # Metrics and traces.
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        names = [executor.name for executor in self.executors]
        if len(set(names)) != len(names):
            raise ValueError("two executors have the same name")
        issuers = [issuer.issuer for issuer in self.token_issuers]
        if len(set(issuers)) != len(issuers):
            raise ValueError("two token issuers have the same name")
        unknown = sorted({executor.base_model for executor in self.executors} - set(self.tokenizers))
        if unknown:
            raise ValueError(f"no tokenizer directory for the base model {unknown[0]!r} of an executor")
        for name in ("max_queued", "max_running", "executor_window", "max_prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("queue_residence_s", "poll_interval_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("executor_wait_s", "reserved_places"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
