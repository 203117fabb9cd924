"""What every tenant has been charged, in milliseconds of work: the counters of a virtual-token-counter queue.

    charge      counter += work / weight. A request's prompt and its load, as far as they can be foretold, when it
                leaves the queue; decode token by token; a load that took longer when the executor reports it
    refund      what was charged too much (a prompt whose keys were still there, a load that was not needed) pays for
                the tenant's next work. A counter never falls, so neither does the least of them
    lift        a tenant that comes back does not bring its idle time along: its counter is raised to the least of the
                tenants that wait and may run, or, if nobody waits, to that of the tenant that waited last
    lag         a tenant that waits and cannot be served (for a load, for room that only others may use) is owed no more
                than `lag_ms` when it can

The tenant with the least counter is served next. When it is, its counter rises at once by A at most, the largest charge
of an admission, and then by D at most for each of the R requests it may have running: their decode, and what was
foretold too low. The other's counter meanwhile does not fall. So the counters of two tenants that both wait differ by
no more than

    U = A + R * D + lag,   lag = A
"""

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["prefill", "decode", "load", "hold", "elsewhere"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(slots=True)
class Account:
    """One tenant. `weight` > 0; `counter` is weighted and lifted, the others are plain sums of work in ms, what was
    refunded not included. `elsewhere` is what other routers charged."""

    weight: float = 1.0
    counter: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    load: float = 0.0
    hold: float = 0.0
    elsewhere: float = 0.0
    # Paid already: the next charges take from it first.
    paid_ahead: float = 0.0

    @property
    def work(self) -> float:
        """What this router charged, in ms."""
        return self.prefill + self.decode + self.load + self.hold

    def add(self, other: "Account") -> None:
        """Adds the sums of another account; the counter is nobody else's."""
        for kind in KINDS:
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))


class Bill:
    """What one request is charged, from its admission to its end. `late_ms` is what came after the admission."""

    __slots__ = ("_ledger", "late_ms", "load_ms", "prefill_ms", "tenant")

    def __init__(self, ledger: "Ledger", tenant: str, *, prefill_ms: float, load_ms: float) -> None:
        self._ledger = ledger
        self.tenant = tenant
        self.prefill_ms = prefill_ms
        self.load_ms = load_ms
        self.late_ms = 0.0

    def decode(self, work_ms: float) -> None:
        """Charges generated tokens."""
        self._late("decode", work_ms)

    def loaded(self, load_ms: float) -> None:
        """Corrects the foretold load to what it took, 0 when somebody else's load served."""
        change, self.load_ms = load_ms - self.load_ms, load_ms
        self._late("load", change)

    def moved(self, load_ms: float) -> None:
        """Charges the load that is foretold where the request goes now; the one that it caused before stays charged."""
        self.load_ms = 0.0
        self.loaded(load_ms)

    def computed(self, prefill_ms: float) -> None:
        """Corrects the foretold prefill to what was computed."""
        change, self.prefill_ms = prefill_ms - self.prefill_ms, prefill_ms
        self._late("prefill", change)

    def _late(self, kind: Kind, work_ms: float) -> None:
        if work_ms >= 0:
            self.late_ms += work_ms
            self._ledger.charge_late(self.tenant, kind, work_ms, request_ms=self.late_ms)
        else:
            self._ledger.refund(self.tenant, kind, -work_ms)


def is_rollout(account: str) -> bool:
    """Rollouts pay for their probes and copies from accounts of their own, under their resource names."""
    return "/" in account


class Ledger:
    """The accounts of all tenants that ever asked, and of the rollouts that run."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        # The sums of accounts that were closed.
        self.closed = Account()
        self._largest_admission = 0.0
        self._largest_late = 0.0
        self._served = 0.0

    @property
    def accounts(self) -> dict[str, Account]:
        """The accounts by tenant, for reading."""
        return self._accounts

    @property
    def lag_ms(self) -> float:
        """What a tenant that could not be served may be owed."""
        return self._largest_admission

    @property
    def served_ms(self) -> float:
        """The highest counter that was the least when its tenant was served."""
        return self._served

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets a tenant's share; what was charged before stays as it is."""
        self._account(tenant).weight = weight

    def counter(self, tenant: str) -> float:
        """Returns a tenant's counter, 0 for a new one."""
        account = self._accounts.get(tenant)
        return account.counter if account is not None else 0.0

    def lift(self, tenant: str, least: float) -> None:
        """Raises a returning tenant's counter to `least`, if that is more. It leaves what it had paid ahead behind."""
        account = self._account(tenant)
        if account.counter < least:
            account.counter = least
            account.paid_ahead = 0.0

    def catch_up(self, tenant: str) -> None:
        """Called when a tenant that could not be served can be, or is looked at again: see `lag`."""
        account = self._account(tenant)
        account.counter = max(account.counter, self._served - self.lag_ms)

    def open(self, tenant: str, *, prefill_ms: float, load_ms: float = 0.0) -> Bill:
        """Charges a request that leaves the queue, and returns its bill."""
        self._served = max(self._served, self.counter(tenant))
        self._largest_admission = max(self._largest_admission, prefill_ms + load_ms)
        self._charge(tenant, "prefill", prefill_ms)
        self._charge(tenant, "load", load_ms)
        return Bill(self, tenant, prefill_ms=prefill_ms, load_ms=load_ms)

    def charge_late(self, tenant: str, kind: Kind, work_ms: float, *, request_ms: float) -> None:
        """Charges work of a request that was charged `request_ms` since its admission."""
        self._largest_late = max(self._largest_late, request_ms)
        self._charge(tenant, kind, work_ms)

    def refund(self, tenant: str, kind: Kind, work_ms: float) -> None:
        """Lets what was charged too much pay for the tenant's next work."""
        account = self._account(tenant)
        setattr(account, kind, getattr(account, kind) - work_ms)
        account.paid_ahead += work_ms

    def charge_hold(self, tenant: str, work_ms: float) -> None:
        """Charges room on a device that a tenant with nothing waiting takes while others wait for room. It is never set
        back behind the others by more than the lag."""
        room = (self._served + self.lag_ms - self.counter(tenant)) * self._account(tenant).weight
        if room > 0:
            self._charge(tenant, "hold", min(work_ms, room))

    def charge_elsewhere(self, tenant: str, work_ms: float) -> None:
        """Charges work that another router of the fleet charged to this tenant."""
        self._charge(tenant, "elsewhere", work_ms)

    def close(self, account: str) -> None:
        """Drops the account of what never comes back; its sums go to `closed`."""
        self.closed.add(self._accounts.pop(account, Account()))

    def bound_ms(self, *, running: int) -> float:
        """Returns U: the bound on the spread between two tenants of weight 1 that both wait, each with at most
        `running` requests running, none larger than the largest that was seen."""
        return self._largest_admission + running * self._largest_late + self.lag_ms

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
        return account

    def _charge(self, tenant: str, kind: Kind, work_ms: float) -> None:
        account = self._account(tenant)
        setattr(account, kind, getattr(account, kind) + work_ms)
        paid = min(account.paid_ahead, work_ms)
        account.paid_ahead -= paid
        account.counter += (work_ms - paid) / account.weight
