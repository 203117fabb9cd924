"""How many bytes a tenant may send and have fetched in a day. Pure: the time is an argument.

Every tenant has a budget that fills up evenly through the day: a full one may be spent at once, and what was spent is
back after as much of a day. What is announced is charged before its first byte is taken, and is not given back when
the bytes turn out bad or do not come: whoever wastes them wastes his own.
"""

DAY_S = 86_400.0


class ByteQuota:
    """The budgets of all tenants, in memory: a restart fills them up. 0 bytes means no limit."""

    def __init__(self, bytes_per_day: int) -> None:
        self._most = bytes_per_day
        # Bytes spent and not yet back at a time, for whoever has spent any.
        self._spent: dict[str, tuple[float, float]] = {}

    def charge(self, tenant: str, size_bytes: int, *, now: float) -> float:
        """Spends `size_bytes` and returns 0, or spends nothing and returns after how many seconds there is room.

        `size_bytes` is at most a day's bytes; more would never find room.
        """
        if not self._most:
            return 0.0
        spent = self._due(tenant, now)
        over = spent + size_bytes - self._most
        if over > 0:
            return over * DAY_S / self._most
        self._forget_the_idle(now)
        self._spent[tenant] = (spent + size_bytes, now)
        return 0.0

    def _due(self, tenant: str, now: float) -> float:
        spent, at = self._spent.get(tenant, (0.0, now))
        return max(0.0, spent - (now - at) * self._most / DAY_S)

    def _forget_the_idle(self, now: float) -> None:
        """Keeps the books as short as the list of tenants that have something to pay back."""
        for tenant in [name for name in self._spent if not self._due(name, now)]:
            del self._spent[tenant]
