"""Every metric that a service exports: its name, what it counts, and the closed sets that its labels come from.

A label's value is one of its set or `other`: nothing that a tenant, a caller or an adapter is called ever becomes one,
so the number of series is known before the first is made (`Metric.most_series`). `docs/metrics.md` is made from this
table, and tests hold the table, what services export, and the queries of dashboards and alerts against one another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from loraport.bundle.codes import VIOLATIONS
from services.shared.access import POLICIES
from services.shared.errors import REASONS, Code

OTHER = "other"

Kind = Literal["counter", "histogram", "gauge"]
Service = Literal["registry", "loader", "router", "executor"]
_ALL: tuple[Service, ...] = ("registry", "loader", "router", "executor")
_SUFFIX = {"s": "_seconds", "By": "_bytes", "": ""}

# Seconds.
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# A tenant's class is its weight against the usual weight of 1.
TENANT_CLASSES = ("low", "standard", "high")
_TENANT_CLASS = frozenset(TENANT_CLASSES)
_REASON = frozenset(REASONS)
_STAGE = frozenset(
    {"RESOLVE", "FETCH", "VERIFY", "PROMOTE", "STAGE_HOST", "RESERVE", "TRANSFER", "INIT", "WARM", "READY"}
)
_INTAKE_STAGE = frozenset({"RECEIVE", "REPORT"})
# The names of services/executor/kernels/dispatch.py.
_TRITON = frozenset(
    {f"triton-decode-{block}" for block in ("1x8", "4x8")}
    | {f"triton-prefill-{block}" for block in ("16x16", "16x64", "64x16", "64x64")}
)
_KERNEL_PATHS = frozenset(
    {"base", "merged", "torch-reference", "cpu-compiled"}
    | {f"cpu-torch-{kind}" for kind in ("paged", "segmented", "mixed")}
    | _TRITON
    | {f"{name}-graph" for name in _TRITON}
)
_REVISION_STATES = frozenset({"PENDING", "VERIFIED", "ACTIVE", "QUARANTINED", "REVOKED"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. `unit` is `s`, `By` or empty for a number; `labels` maps each label to its values, empty for none.

    A histogram's `buckets` are upper bounds in its unit, of which another counts the rest.
    """

    name: str
    kind: Kind
    help: str
    services: tuple[Service, ...]
    unit: str = ""
    labels: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Its name at the Prometheus endpoint; a histogram has it with `_bucket`, `_sum` and `_count`."""
        base = self.name.replace(".", "_") + _SUFFIX[self.unit]
        return base + "_total" if self.kind == "counter" else base

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names of its series at the Prometheus endpoint."""
        if self.kind != "histogram":
            return (self.prometheus,)
        return tuple(self.prometheus + part for part in ("_bucket", "_sum", "_count"))

    @property
    def most_series(self) -> int:
        """How many combinations of labels there can be, `other` included."""
        most = 1
        for values in self.labels.values():
            most *= len(values) + 1
        return most

    def bounded(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Returns the labels with `other` for every value that is not in its set. Raises KeyError for another label."""
        if labels.keys() != self.labels.keys():
            raise KeyError(f"{self.name} has the labels {sorted(self.labels)}, not {sorted(labels)}")
        return {key: value if value in self.labels[key] else OTHER for key, value in labels.items()}


def tenant_class(weight: float) -> str:
    """Returns the class of a tenant of this weight."""
    if weight == 1.0:
        return "standard"
    return "high" if weight > 1.0 else "low"


def _labels(**values: Iterable[str]) -> Mapping[str, frozenset[str]]:
    return MappingProxyType({key: frozenset(found) for key, found in values.items()})


def _metric(services: tuple[Service, ...], kind: Kind, name: str, text: str, unit: str = "", **rest: object) -> Metric:
    return Metric(name=f"loraport.{name}", kind=kind, help=text, services=services, unit=unit, **rest)  # type: ignore[arg-type]


# Every service

RPC_DURATION = _metric(
    _ALL, "histogram", "rpc.duration", "How long a call took, by method and status code.", "s",
    labels=_labels(method=POLICIES, code={"OK", *(code.name for code in Code)}), buckets=_FAST,
)  # fmt: skip
LOOP_LAG = _metric(
    _ALL, "histogram", "loop.lag", "How much later than it was due the event loop did something.", "s",
    buckets=_FAST,
)  # fmt: skip
BUILD = _metric(_ALL, "gauge", "up", "1 while the process serves.")
CHECKPOINT_AGE = _metric(
    ("registry", "loader", "executor"), "gauge", "checkpoint.age",
    "Age of the newest checkpoint of the registry's log that the process signed or believes.", "s",
)  # fmt: skip
CATALOG_EPOCH = _metric(_ALL, "gauge", "catalog.epoch", "The newest epoch of the catalog that the process knows.")
LOOKUPS = _metric(
    ("loader", "executor"), "counter", "adapter.lookups",
    "Looks for a revision in a tier: a hit found it there, a miss went on to the next.",
    labels=_labels(tier={"DEVICE", "HOST", "DISK", "STORE"}, result={"hit", "miss"}),
)  # fmt: skip
LOAD_STAGES = _metric(
    ("executor",), "histogram", "adapter.load.duration",
    "How long a stage of bringing a revision to the device took; READY is the whole load.", "s",
    labels=_labels(stage=_STAGE, tier={"", "STORE", "DISK"}), buckets=_FAST,
)  # fmt: skip
MOVED = _metric(
    ("loader", "executor"), "counter", "adapter.moved", "Bytes of adapters moved out of a tier.", "By",
    labels=_labels(tier={"STORE", "DISK", "HOST"}),
)  # fmt: skip

# Router

REQUESTS = _metric(
    ("router",), "counter", "router.requests", "Requests that have ended, by how.",
    labels=_labels(kind={"generate", "score"}, outcome={"OK", "CANCELLED", *_REASON}, tenant_class=_TENANT_CLASS),
)  # fmt: skip
TTFT = _metric(
    ("router",), "histogram", "router.ttft", "From a request's arrival to its first token.", "s",
    labels=_labels(start={"warm", "cold", "base"}, tenant_class=_TENANT_CLASS), buckets=_SLOW,
)  # fmt: skip
TPOT = _metric(
    ("router",), "histogram", "router.tpot", "Mean time from one token of a request to its next.", "s",
    labels=_labels(tenant_class=_TENANT_CLASS), buckets=_FAST,
)  # fmt: skip
QUEUE_RESIDENCE = _metric(
    ("router",), "histogram", "router.queue.residence", "How long a request waited in its tenant's queue.", "s",
    labels=_labels(tenant_class=_TENANT_CLASS), buckets=_SLOW,
)  # fmt: skip
ANSWERED = _metric(
    ("router",), "counter", "router.answered", "Requests that an executor began, with the right revision or another.",
    labels=_labels(revision={"right", "wrong"}),
)  # fmt: skip
ACCEPTED = _metric(
    ("router",), "counter", "router.accepted",
    "Requests that ended well with the right revision, by whether they met the objectives of telemetry.objectives.",
    labels=_labels(verdict={"met", "slow_first_token", "slow_tokens"}),
)  # fmt: skip
QUEUED = _metric(
    ("router",), "gauge", "router.queued", "Requests that wait in queues.", labels=_labels(tenant_class=_TENANT_CLASS)
)
OLDEST_WAIT = _metric(("router",), "gauge", "router.queue.oldest", "Age of the oldest request that waits.", "s")
RUNNING = _metric(
    ("router",), "gauge", "router.running", "Requests that run on executors.",
    labels=_labels(tenant_class=_TENANT_CLASS),
)  # fmt: skip
WORK = _metric(
    ("router",), "gauge", "router.work", "Work charged since the start, in seconds of the bottleneck resource.", "s",
    labels=_labels(work={"prefill", "decode", "load", "hold", "elsewhere"}, tenant_class=_TENANT_CLASS),
)  # fmt: skip
FAIRNESS_SPREAD = _metric(
    ("router",), "gauge", "router.fairness.spread",
    "Largest difference between the counters of two tenants that wait, over the published bound: above 1 is a fault.",
)  # fmt: skip
EXECUTORS = _metric(
    ("router",), "gauge", "router.executors", "Executors as the router sees them.",
    labels=_labels(state={"serving", "out", "drained"}),
)  # fmt: skip
ADAPTERS = _metric(
    ("router",), "gauge", "adapter.known", "Revisions in the catalog, by state.", labels=_labels(state=_REVISION_STATES)
)
ACTIVE_REVISIONS = _metric(
    ("router",), "gauge", "adapter.active", "Distinct revisions that were asked for in the last five minutes."
)
WORKING_SET = _metric(
    ("router",), "gauge", "adapter.working_set",
    "Bytes of the distinct revisions that were asked for in the last five minutes.", "By",
)  # fmt: skip
CAPACITY = _metric(
    ("router",), "gauge", "adapter.capacity", "Bytes of the adapter pools of all executors that serve.", "By"
)

# Executor

STEP_DURATION = _metric(
    ("executor",), "histogram", "executor.step.duration", "How long a step of the device took.", "s",
    labels=_labels(step={"prefill", "decode", "mixed"}), buckets=_FAST,
)  # fmt: skip
STEP_ROWS = _metric(("executor",), "histogram", "executor.step.rows", "Rows of a step.", buckets=_COUNTS)
STEP_ADAPTERS = _metric(
    ("executor",), "histogram", "executor.step.adapters", "Distinct adapters of a step.", buckets=(0.0, *_COUNTS)
)
KERNEL_STEPS = _metric(
    ("executor",), "counter", "executor.kernel.steps", "Steps by what computed their adapters.",
    labels=_labels(path=_KERNEL_PATHS),
)  # fmt: skip
STEP_TOKENS = _metric(
    ("executor",), "counter", "executor.tokens", "Tokens computed.", labels=_labels(step={"prefill", "decode"})
)
DEVICE_BUSY = _metric(("executor",), "counter", "executor.busy", "Time that steps took: device-seconds.", "s")
STEPS = _metric(("executor",), "counter", "executor.steps", "Steps run.")
MODELS_RUN = _metric(
    ("executor",), "counter", "executor.models",
    "Distinct models of each step, the base alone being one: the steps that one model per tenant would have taken.",
)  # fmt: skip
READ_BYTES = _metric(
    ("executor",), "counter", "executor.read", "Bytes of weights that steps read.", "By",
    labels=_labels(weights={"base", "adapter"}),
)  # fmt: skip
SHORTEST_STEP = _metric(
    ("executor",), "gauge", "executor.step.shortest", "The shortest decode step since the start.", "s"
)
BASE_BYTES = _metric(("executor",), "gauge", "executor.base", "Bytes of the base model's weights.", "By")
KV_BLOCKS = _metric(
    ("executor",), "gauge", "executor.kv.blocks", "Key-value blocks.", labels=_labels(state={"used", "cached", "free"})
)
POOL_BYTES = _metric(
    ("executor",), "gauge", "executor.pool", "Bytes of the adapter pool.", "By", labels=_labels(state={"used", "free"})
)
RESIDENTS = _metric(
    ("executor",), "gauge", "executor.residents", "Revisions on the device.",
    labels=_labels(state={"LOADING", "READY", "DRAINING"}),
)  # fmt: skip
EVICTIONS = _metric(
    ("executor",), "counter", "executor.evictions", "Revisions that left the device, by why.",
    labels=_labels(reason={"capacity", "operator", "revoked"}),
)  # fmt: skip
DEVICE_LOADS = _metric(("executor",), "counter", "executor.loads", "Loads to the device that were begun.")
THRASH = _metric(
    ("executor",), "counter", "executor.thrash", "Loads of what had been evicted less than half a minute before."
)
LOADS_OPEN = _metric(("loader", "executor"), "gauge", "loads.open", "Loads under way.")
EXECUTOR_REQUESTS = _metric(
    ("executor",), "gauge", "executor.requests", "Requests in the executor.",
    labels=_labels(state={"waiting", "running"}),
)  # fmt: skip
EXECUTOR_QUEUE = _metric(
    ("executor",), "histogram", "executor.queue.residence", "How long a request waited for its first row.", "s",
    buckets=_FAST,
)  # fmt: skip
PREEMPTIONS = _metric(("executor",), "counter", "executor.preemptions", "Requests that lost their blocks for a while.")

# Loader

LOADER_STAGES = _metric(
    ("loader",), "histogram", "loader.stage.duration", "How long a stage of a load or of an intake took.", "s",
    labels=_labels(
        kind={"load", "intake"},
        stage=_STAGE | _INTAKE_STAGE,
        outcome={"OK", "REFUSED", "SPOILED", "CANCELLED", *_REASON},
        tier={"", "STORE", "DISK"},
    ),
    buckets=_FAST,
)  # fmt: skip
REFUSALS = _metric(
    ("loader",), "counter", "loader.refusals", "Bundles that were refused, once for each code of violation.",
    labels=_labels(code=(*VIOLATIONS, "DIGEST_MISMATCH", "IDENTITY_MISMATCH")),
)  # fmt: skip
HOST_BYTES = _metric(
    ("loader",), "gauge", "loader.host", "Bytes of host memory for sealed weights.", "By",
    labels=_labels(state={"used", "free"}),
)  # fmt: skip
HOST_ENTRIES = _metric(("loader",), "gauge", "loader.host.entries", "Sealed revisions in host memory.")

# Registry

REGISTRY_REVISIONS = _metric(
    ("registry",), "gauge", "registry.revisions", "Revisions, by state.", labels=_labels(state=_REVISION_STATES)
)
ROLLOUTS = _metric(
    ("registry",), "gauge", "registry.rollouts", "Rollouts that have not ended, by where they are.",
    labels=_labels(state={"PRELOADING", "PROBING", "SHADOWING", "SPLITTING", "PAUSED", "RETAINING"}),
)  # fmt: skip
LOG_SIZE = _metric(("registry",), "gauge", "registry.log.leaves", "Leaves of the newest signed log.")
CALLS_REFUSED = _metric(
    ("registry",), "counter", "registry.calls.refused", "Calls refused before their handler.",
    labels=_labels(reason=_REASON),
)  # fmt: skip

METRICS: Mapping[str, Metric] = MappingProxyType(
    {found.name: found for found in list(globals().values()) if isinstance(found, Metric)}
)
