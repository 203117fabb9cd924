"""The host tier under any sequence of uses: within budget, and a lease is never evicted."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.loader.host_tier import HostTier, TierFull

DIGESTS = st.sampled_from([f"d{number}" for number in range(6)])
HOLDERS = st.sampled_from(["a", "b"])
TENANTS = st.sampled_from(["acme", "globex", "initech"])


class TierMachine(RuleBasedStateMachine):
    """Mirrors what the shell does; `held` is what a careless reader of the books would believe."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(100)
        self.now = 0.0
        self.count = 0
        self.reserved: dict[str, str] = {}
        self.held: dict[str, tuple[str, str]] = {}  # lease id: (digest, holder)

    def fresh(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def left(self, digests: list[str]) -> None:
        """Nothing that is held may leave."""
        assert not {digest for digest, _ in self.held.values()} & set(digests)
        assert len(set(digests)) == len(digests)

    @rule(digest=DIGESTS, size=st.integers(1, 120), tenants=st.sets(TENANTS, min_size=1))
    def reserve(self, digest: str, size: int, tenants: set[str]) -> None:
        there = {entry.digest for entry in self.tier.entries()} | set(self.reserved.values())
        if digest in there:
            return
        token = self.fresh()
        before = [entry.digest for entry in self.tier.entries()]
        try:
            self.left(self.tier.reserve(token, size, tenants=tenants))
            self.reserved[token] = digest
        except TierFull:
            assert [entry.digest for entry in self.tier.entries()] == before

    @rule(keep=st.booleans())
    def finish(self, keep: bool) -> None:
        if not self.reserved:
            return
        token, digest = self.reserved.popitem()
        if keep:
            self.tier.commit(token, digest, now=self.now)
            self.held[token] = (digest, "")
        else:
            self.tier.cancel(token)

    @rule(digest=DIGESTS, holder=HOLDERS, tenant=TENANTS)
    def lease(self, digest: str, holder: str, tenant: str) -> None:
        if self.tier.find(digest) is not None:
            lease_id = self.fresh()
            self.tier.lease(digest, lease_id, holder=holder, tenant=tenant, now=self.now)
            self.held[lease_id] = (digest, holder)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            lease_id = data.draw(st.sampled_from(sorted(self.held)))
            del self.held[lease_id]
            self.left(self.tier.release(lease_id))

    @rule(data=st.data(), holder=HOLDERS)
    def use(self, data: st.DataObject, holder: str) -> None:
        if self.held:
            lease_id = data.draw(st.sampled_from(sorted(self.held)))
            found = self.tier.use(lease_id, holder=holder, now=self.now)
            assert (found is not None) == (self.held[lease_id][1] == holder)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        expired, left = self.tier.expire(now=self.now, idle_s=15.0)
        for lease_id in expired:
            assert self.held.pop(lease_id)[1]
        self.left(left)

    @rule(digest=DIGESTS)
    def doom(self, digest: str) -> None:
        self.left(self.tier.doom(digest))

    @rule(digest=DIGESTS)
    def revive(self, digest: str) -> None:
        self.tier.revive(digest)

    @invariant()
    def books_are_right(self) -> None:
        self.tier.check()
        there = {entry.digest for entry in self.tier.entries()}
        assert {digest for digest, _ in self.held.values()} <= there


TierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTier = TierMachine.TestCase
