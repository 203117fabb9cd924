"""What every tenant has been charged, in milliseconds of nominal work: the counters of a virtual-token-counter queue.

    charge      counter += work / weight, as the work becomes known: prefill when a request leaves the queue,
                decode token by token, a load when the executor reports it
    lift        a tenant that comes back does not bring its idle time along: its counter is raised to the least of the
                tenants that wait, or, if nobody waits, to that of the tenant that waited last

The tenant with the least counter is served next, so two tenants that both wait and may run drift apart by no more
than `bound_ms`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode", "load"]


@dataclass(slots=True)
class Account:
    """One tenant. `weight` > 0; `counter` is weighted and lifted, the others are plain sums of work in ms."""

    weight: float = 1.0
    counter: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    load: float = 0.0


class Ledger:
    """The accounts of all tenants that ever asked. Costs are milliseconds per token."""

    def __init__(self, *, prefill_ms_per_token: float, decode_ms_per_token: float) -> None:
        self._prefill_ms = prefill_ms_per_token
        self._decode_ms = decode_ms_per_token
        self._accounts: dict[str, Account] = {}
        self._largest_load_ms = 0.0

    @property
    def accounts(self) -> dict[str, Account]:
        """The accounts by tenant, for reading."""
        return self._accounts

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets a tenant's share; what was charged before stays as it is."""
        self._account(tenant).weight = weight

    def counter(self, tenant: str) -> float:
        """Returns a tenant's counter, 0 for a new one."""
        account = self._accounts.get(tenant)
        return account.counter if account is not None else 0.0

    def lift(self, tenant: str, others: Iterable[str]) -> None:
        """Raises a returning tenant's counter to the least of `others`, if that is more."""
        counters = [self.counter(other) for other in others]
        if counters:
            account = self._account(tenant)
            account.counter = max(account.counter, min(counters))

    def charge_prefill(self, tenant: str, tokens: int) -> None:
        """Charges the prompt of a request that leaves the queue."""
        self._charge(tenant, "prefill", tokens * self._prefill_ms)

    def charge_decode(self, tenant: str, tokens: int) -> None:
        """Charges generated tokens."""
        self._charge(tenant, "decode", tokens * self._decode_ms)

    def charge_load(self, tenant: str, load_ms: float) -> None:
        """Charges an adapter load to the tenant whose request caused it."""
        self._largest_load_ms = max(self._largest_load_ms, load_ms)
        self._charge(tenant, "load", load_ms)

    def bound_ms(self, *, running: int, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns the bound on the spread between two tenants of weight 1 that both wait and may run.

        `running` requests of a tenant, each at most so long, may all have been sent just before the tenant's counter
        moved: that much of its work is not charged yet.
        """
        request = prompt_tokens * self._prefill_ms + completion_tokens * self._decode_ms + self._largest_load_ms
        return 2 * running * request

    def _account(self, tenant: str) -> Account:
        return self._accounts.setdefault(tenant, Account())

    def _charge(self, tenant: str, kind: Kind, work_ms: float) -> None:
        account = self._account(tenant)
        setattr(account, kind, getattr(account, kind) + work_ms)
        account.counter += work_ms / account.weight
