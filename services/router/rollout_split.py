"""Which side of a rollout a request is on, and which revision that is. Pure.

The bucket decides (`services.shared.split`); what is remembered of conversations only ever keeps one where it is. A
share that grows past a conversation's bucket does not change its revision under way; it changes when the conversation
has been still for `IDLE_S`. A share that falls is a rollback: then every request goes to the old revision at once, also
of conversations that the new one has begun.
"""

from collections import OrderedDict
from dataclasses import dataclass

from services.shared.catalog import CatalogView, RolloutItem
from services.shared.split import Arm, arm_of, bucket_of

IDLE_S = 600.0
MAX_CONVERSATIONS = 100_000


@dataclass(frozen=True, slots=True)
class Side:
    """The side that a request is on: of which rollout, which arm, in which step it was placed, by which bucket."""

    rollout: str
    arm: Arm
    step: int
    bucket: int = 0


def choose(item: RolloutItem, tenant: str, unit: str) -> tuple[Arm, int]:
    """Returns the arm of a tenant's unit, and the bucket that says so."""
    bucket = bucket_of(item.salt, tenant, unit)
    return arm_of(bucket, item.share_basis_points), bucket


def revision_of(item: RolloutItem, arm: Arm) -> str:
    """Returns the id of the revision that an arm gets."""
    return item.to_revision_id if arm == "new" else item.from_revision_id


class Conversations:
    """Conversations that the old revision has begun to answer. Times in seconds on the caller's monotonic clock."""

    def __init__(self, *, most: int = MAX_CONVERSATIONS, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        # (rollout, tenant, session) → when it was last heard of; longest ago first.
        self._old: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._old)

    def settle(self, item: RolloutItem, arm: Arm, *, tenant: str, session: str, now: float) -> Arm:
        """Returns the arm of a conversation's next request, and remembers it. Without a session there is none."""
        if not session:
            return arm
        key = (item.name, tenant, session)
        heard = self._old.pop(key, None)
        if arm == "new" and (heard is None or now - heard > self._idle_s):
            return "new"
        self._old[key] = now
        while self._old and (len(self._old) > self._most or next(iter(self._old.values())) < now - self._idle_s):
            self._old.popitem(last=False)
        # It is no control any more: its like are in the new arm.
        return "old" if arm == "new" else arm

    def forget(self, view: CatalogView) -> None:
        """Drops what is remembered of rollouts that no longer run."""
        running = {item.name for item in view.rollouts.values()}
        for key in [key for key in self._old if key[0] not in running]:
            del self._old[key]
