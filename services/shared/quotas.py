"""What a tenant may use up: eight limits, each of which may be absent, and the one way to refuse.

The registry keeps those in `AT_REGISTRY`, routers the others; both say the same when one is used up.
"""

from dataclasses import dataclass, fields

from services.shared.errors import LoraportError

MAX_LIMIT = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A tenant's quotas, as `loraport.registry.v1.TenantQuota` describes them. None: no limit; 0: nothing at all."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight_count: int | None = None
    queued_count: int | None = None
    cold_loads_per_minute: int | None = None
    adapter_count: int | None = None
    stored_bytes: int | None = None
    resident_bytes: int | None = None

    def given(self) -> dict[str, int]:
        """Returns the limits that are set, by name."""
        return {name: limit for name in NAMES if (limit := getattr(self, name)) is not None}


NAMES = tuple(field.name for field in fields(Quota))
AT_REGISTRY = ("adapter_count", "stored_bytes")
NO_QUOTA = Quota()


def quota_exceeded(tenant: str, name: str, limit: int, *, retry_after_s: float | None = None) -> LoraportError:
    """Returns the refusal, which says no more than the caller's own quota.

    `retry_after_s` is None where waiting is in vain.
    """
    return LoraportError(
        "QUOTA_EXCEEDED",
        f"the quota {name} of {limit} is used up",
        quota=(f"tenants/{tenant}", f"{name}: at most {limit}"),
        retry_after_s=retry_after_s,
        metadata={"quota": name, "limit": str(limit)},
    )
