"""What several routers charged, brought together: each says what it charged, and takes over what the others said.

    say      tenant → work that this router charged since it started, in ms
    hear     the others' sums; what they grew by since they were heard last is charged here as `elsewhere`

Only what exceeds the highest sum that was heard counts, so a report that is missed or comes twice loses and doubles
nothing, and a refund is waited out. A router that is heard for the
first time only says where to count from. Between two exchanges the routers do not know of each other's work: each may
have charged a tenant, ahead of the others' knowledge, what `slack_ms` says.
"""

from collections.abc import Mapping

from services.router.ledger import Ledger, is_rollout

EXCHANGE_S = 0.5
# A report that is older counts for nothing: its router is gone.
STALE_S = 10.0
MAX_TENANTS = 5000


class SharedWork:
    """See the module's text. `router` names this process; a restarted one has another name."""

    def __init__(self, ledger: Ledger, *, router: str) -> None:
        self._ledger = ledger
        self.router = router
        self._heard: dict[str, dict[str, float]] = {}

    def say(self) -> dict[str, float]:
        """Returns this router's sums; of very many tenants, those that were charged most."""
        work = {tenant: account.work for tenant, account in self._ledger.accounts.items() if account.work > 0}
        if len(work) > MAX_TENANTS:
            work = dict(sorted(work.items(), key=lambda item: -item[1])[:MAX_TENANTS])
        return work

    def hear(self, reports: Mapping[str, Mapping[str, float]]) -> None:
        """Takes over what the others charged; its own report is left out."""
        for router, work in reports.items():
            if router == self.router:
                continue
            before = self._heard.get(router)
            known = self._heard.setdefault(router, {})
            for ended in [account for account in known if is_rollout(account) and account not in work]:
                del known[ended]
            for tenant, charged in work.items():
                more = charged - known.get(tenant, 0.0)
                if more > 0:
                    known[tenant] = charged
                    if before is not None:
                        self._ledger.charge_elsewhere(tenant, more)
        for gone in self._heard.keys() - reports.keys():
            del self._heard[gone]


def slack_ms(*, executors: int, exchange_s: float = EXCHANGE_S) -> float:
    """Returns how far two tenants' work may drift apart, beyond each router's own bound, for want of news: executors
    work all the time, and news is one exchange old when it is read and one when it was written."""
    return 2 * exchange_s * 1000 * executors
