"""What an executor is told at its start."""

from dataclasses import dataclass, field
from typing import Literal

from services.shared.checkpoint import CheckpointPolicy
from services.shared.rpc.channels import TlsFiles
from services.shared.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How the base model is computed."""

    # Which decoder: `native` for the Llama family, `transformers` for other decoders, `auto` for the fastest that is
    # exact.
    path: Literal["auto", "native", "transformers"] = "auto"
    # One tenant's traffic alone comes here: the executor may be put in merged mode for one revision.
    dedicated: bool = False
    # What a CPU computes a bfloat16 base in: `native` for bfloat16, `float32` for the same numbers upcast (twice the
    # memory), `auto` for float32 exactly where the CPU has no bfloat16 products and would emulate them.
    cpu_products: Literal["auto", "native", "float32"] = "auto"
    # Compile the decode step for this CPU at the start, two or three seconds; needs a C++ compiler. `auto` does without
    # where there is none, `on` does not start then, `off` never compiles.
    compiled: Literal["auto", "on", "off"] = "auto"
    # Where it is computed: `cpu`, or `cuda` for the process's first GPU (docs/kernels.md).
    device: Literal["cpu", "cuda"] = "cpu"
    # What capturing decode graphs may take of a GPU at the start, in seconds and bytes; 0 for no graphs.
    graph_seconds: float = 60.0
    graph_bytes: int = 1 << 30
    # Cap on prompt and answer together; 0 for the base model's own limit.
    max_context_tokens: int = 4096
    # Compute threads; 0 for as many as there are cores.
    threads: int = 0

    def __post_init__(self) -> None:
        if min(self.max_context_tokens, self.threads, self.graph_seconds, self.graph_bytes) < 0:
            raise ValueError("max_context_tokens, threads, graph_seconds and graph_bytes are not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeLimits:
    """When a process ends. Times in seconds."""

    # How long running requests may take to end at shutdown.
    drain_s: float = 20.0
    # A step that takes longer is stuck: the process says NOT_SERVING and ends, for whoever runs it to start again.
    step_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.drain_s < 0 or self.step_timeout_s <= 0:
            raise ValueError("drain_s is not negative, step_timeout_s is above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """How revisions are brought to the device."""

    # Loads at a time.
    at_a_time: int = 2
    # How long one may take, in seconds.
    timeout_s: float = 120.0
    # How much of them is copied between two steps while requests run, in bytes.
    bytes_per_step: int = 8 << 20

    def __post_init__(self) -> None:
        if min(self.at_a_time, self.bytes_per_step) < 1 or self.timeout_s <= 0:
            raise ValueError("loads.at_a_time and loads.bytes_per_step are at least 1, loads.timeout_s is above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Fields of the configuration file. Sizes in bytes, times in seconds, addresses `host:port`."""

    # Names this executor in answers, notices and its certificate; an id (a-z, 0-9, hyphens).
    name: str
    # Address for peers, with mTLS.
    listen: str
    # Directory of the base model: config.json, safetensors, tokenizer.
    base_dir: str
    # Id of the base model in the registry; only shown, what counts is the digest of the directory.
    base_model: str
    # What the base is rounded to, and computed in unless `model.cpu_products` says otherwise.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    model: ModelOptions = field(default_factory=ModelOptions)
    # This service's certificate and key, and the two CAs.
    tls: TlsFiles
    # Directory of trust roots, where the first one is believed.
    trust_dir: str
    registry_address: str
    # The loader of this node.
    loader_address: str
    # How the registry's checkpoints are treated: where the floor is kept, how long the grace is.
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    # The notice board; empty for none.
    valkey_url: str = ""
    # Budget for keys and values of all requests.
    kv_bytes: int = 384 << 20
    # Budget for the adapters on the device; those of the token embedding may take a quarter of it more.
    pool_bytes: int = 512 << 20
    # Tokens of a key/value block.
    block_size: int = 16
    # Rank rows of an adapter page; 0 for what suits the device: one on a CPU, so that an adapter takes what its rank
    # takes, eight on a GPU, whose kernels read so many at a time.
    page_rows: int = 0
    # Rows and tokens of one step, and requests that may be open at once.
    max_rows: int = 64
    max_step_tokens: int = 512
    max_open: int = 1024
    # Which idle revision leaves when room is needed.
    eviction: Literal["gdsf-d", "lru"] = "gdsf-d"
    loads: LoadLimits = field(default_factory=LoadLimits)
    life: LifeLimits = field(default_factory=LifeLimits)
    # Metrics and traces.
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        counts = (self.kv_bytes, self.pool_bytes, self.block_size, self.max_rows, self.max_step_tokens)
        if min(*counts, self.max_open) < 1 or self.page_rows < 0:
            raise ValueError("budgets, sizes and counts must be at least 1")
        if self.max_step_tokens < self.max_rows:
            raise ValueError("max_step_tokens must hold one token of every row, so at least max_rows")
        if self.dtype == "float16" and self.model.device == "cpu":
            raise ValueError("float16 is for a GPU: a CPU computes a base in float32 or bfloat16")
