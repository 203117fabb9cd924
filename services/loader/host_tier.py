"""Who may stay in host memory: a byte budget, leases, and for room what `shares` says of what nobody holds.

Pure accounting over digests; the bytes themselves are the shell's. Sizes are in bytes, times in seconds on the
caller's monotonic clock. An entry is its tenants': those that it was loaded or leased for.

Invariants (`check`):
 1. used + reserved <= budget, and used is the sum of the entries' sizes.
 2. An entry with a lease is never given up; a lease belongs to exactly one entry.
 3. A doomed entry has a lease: without one it is gone.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from services.loader.shares import Held, may_hold, victims

# What rollouts need leaves last as long as it takes no more than one in so many of the bytes.
LAST_PART = 2


class TierFull(Exception):
    """No room, even without everything that may leave."""


@dataclass(slots=True)
class Entry:
    """A digest in memory. `doomed` entries take no new leases and leave with the last one."""

    digest: str
    size_bytes: int
    tenants: frozenset[str]
    leases: set[str] = field(default_factory=set)
    doomed: bool = False
    pins: int = 0

    @property
    def holders(self) -> int:
        """Leases that callers hold; pins of the loader's own are not among them."""
        return len(self.leases) - self.pins


@dataclass(slots=True)
class Lease:
    """A hold of `holder` on an entry for a tenant, last used at `used`."""

    lease_id: str
    digest: str
    holder: str
    tenant: str
    used: float


class HostTier:
    """The budget's books. Methods that give entries up return their digests, for the shell to close."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._leases: dict[str, Lease] = {}
        self._reserved: dict[str, tuple[int, frozenset[str]]] = {}
        self._refused: dict[str, int] = {}  # who found no room since the last `expire`, and for how much

    @property
    def used_bytes(self) -> int:
        """Bytes of entries and of reservations."""
        reserved = sum(size_bytes for size_bytes, _ in self._reserved.values())
        return sum(entry.size_bytes for entry in self._entries.values()) + reserved

    def entries(self) -> Iterator[Entry]:
        """Yields the entries in order of digest."""
        for digest in sorted(self._entries):
            yield self._entries[digest]

    def find(self, digest: str) -> Entry | None:
        """Returns the entry of a digest that may still be leased."""
        entry = self._entries.get(digest)
        return None if entry is None or entry.doomed else entry

    def reserve(
        self, token: str, size_bytes: int, *, tenants: Collection[str], last: Collection[str] = ()
    ) -> list[str]:
        """Sets room aside under `token` for whoever asks; returns what had to leave for it, by the rules of `shares`.
        The digests in `last` leave after others, as far as they take no more than half of the budget, those that were
        used last before the others.

        Raises:
            TierFull: too little may leave; nothing was given up.
            ValueError: the token is in use, the size is below 1, or nobody asks.
        """
        if token in self._reserved or size_bytes < 1 or not tenants:
            raise ValueError("a reservation needs a fresh token, a size of at least 1 and a tenant")
        under_way, stay = min(map(self._under_way, tenants)), self._staying(last)
        leaving = None
        others = self._tenants().difference(tenants)
        wanted = max((self._refused.get(tenant, 0) for tenant in others), default=0)
        if not others or may_hold(size_bytes, under_way=under_way, budget_bytes=self.budget_bytes, wanted=wanted):
            leaving = victims(
                [
                    Held(entry.digest, entry.size_bytes, entry.tenants, not entry.leases, entry.digest in stay)
                    for entry in self._entries.values()
                ],
                size_bytes,
                askers=frozenset(tenants),
                budget_bytes=self.budget_bytes,
                reserved=tuple(self._reserved.values()),
                under_way=under_way,
            )
        if leaving is None:
            if not under_way and size_bytes <= self.budget_bytes:
                self._refused.update(dict.fromkeys(tenants, size_bytes))
            raise TierFull(f"{size_bytes} bytes of {self.budget_bytes} are needed, beside {under_way} under way")
        for digest in leaving:
            del self._entries[digest]
        self._reserved[token] = (size_bytes, frozenset(tenants))
        for tenant in tenants:
            self._refused.pop(tenant, None)
        return leaving

    def _tenants(self) -> set[str]:
        """Returns who has something here, or found no room a moment ago."""
        entries = (entry.tenants for entry in self._entries.values())
        return set(self._refused).union(*entries, *(tenants for _, tenants in self._reserved.values()))

    def _under_way(self, tenant: str) -> int:
        """Returns the bytes that are set aside or held for a tenant."""
        held = {lease.digest for lease in self._leases.values() if lease.tenant == tenant}
        reserved = sum(size_bytes for size_bytes, tenants in self._reserved.values() if tenant in tenants)
        return reserved + sum(self._entries[digest].size_bytes for digest in held)

    def _staying(self, wanted: Collection[str]) -> set[str]:
        room, stay = self.budget_bytes // LAST_PART, set()
        for entry in reversed(self._entries.values()):
            if entry.digest in wanted and entry.size_bytes <= room:
                room -= entry.size_bytes
                stay.add(entry.digest)
        return stay

    def cancel(self, token: str) -> None:
        """Gives a reservation back; an unknown token has been given back already."""
        self._reserved.pop(token, None)

    def commit(self, token: str, digest: str, *, now: float) -> None:
        """Turns a reservation into an entry, held by a pin of the same name as the token.

        Raises:
            ValueError: there is no such reservation, or the digest is in memory already.
        """
        if token not in self._reserved or digest in self._entries:
            raise ValueError("only a reserved digest that is not in memory can be committed")
        size_bytes, tenants = self._reserved.pop(token)
        self._entries[digest] = Entry(digest, size_bytes, tenants)
        self.lease(digest, token, holder="", tenant=min(tenants), now=now)

    def lease(self, digest: str, lease_id: str, *, holder: str, tenant: str, now: float) -> None:
        """Holds an entry for a tenant. Without a holder it is a pin of the loader's own, which never expires.

        Raises:
            ValueError: the entry is gone or doomed, or the lease id is in use.
        """
        entry = self.find(digest)
        if entry is None or lease_id in self._leases:
            raise ValueError("a lease needs an entry and a fresh id")
        entry.leases.add(lease_id)
        entry.tenants |= {tenant}
        entry.pins += not holder
        self._leases[lease_id] = Lease(lease_id, digest, holder, tenant, now)
        self._entries.move_to_end(digest)

    def use(self, lease_id: str, *, holder: str, now: float) -> Lease | None:
        """Returns a holder's lease and notes its use; None when it has no such lease."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder:
            return None
        lease.used = now
        self._entries.move_to_end(lease.digest)
        return lease

    def release(self, lease_id: str) -> list[str]:
        """Gives a lease back; returns the digest if it leaves with it. An unknown lease is given back already."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        entry = self._entries[lease.digest]
        entry.leases.remove(lease_id)
        entry.pins -= not lease.holder
        return self._drop_if_done(entry)

    def expire(self, *, now: float, idle_s: float) -> tuple[list[str], list[str]]:
        """Releases holders' leases not used for `idle_s`, and forgets who found no room.

        Returns (lease ids, digests that left).
        """
        self._refused.clear()
        old = [lease.lease_id for lease in self._leases.values() if lease.holder and now - lease.used > idle_s]
        return old, [digest for lease_id in old for digest in self.release(lease_id)]

    def doom(self, digest: str) -> list[str]:
        """Takes an entry out of use: at once when nobody holds it, else with its last lease."""
        entry = self._entries.get(digest)
        if entry is None:
            return []
        entry.doomed = True
        return self._drop_if_done(entry)

    def revive(self, digest: str) -> None:
        """Lets a doomed entry take leases again: its digest may serve after all."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.doomed = False

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert 0 <= self.used_bytes <= self.budget_bytes, "over budget"
        held = {lease_id for entry in self._entries.values() for lease_id in entry.leases}
        assert held == set(self._leases), "leases and entries disagree"
        assert sum(len(entry.leases) for entry in self._entries.values()) == len(self._leases), "a lease counted twice"
        for lease in self._leases.values():
            assert lease.lease_id in self._entries[lease.digest].leases, "a lease on another entry"
        assert all(entry.tenants for entry in self._entries.values()), "an entry of nobody"
        assert all(entry.leases for entry in self._entries.values() if entry.doomed), "a doomed entry nobody holds"

    def _drop_if_done(self, entry: Entry) -> list[str]:
        if not entry.doomed or entry.leases:
            return []
        del self._entries[entry.digest]
        return [entry.digest]
