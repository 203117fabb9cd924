"""Which side of a rollout a request is on, and which revision that is. Pure.

The bucket decides (`services.shared.split`); what is remembered of conversations only ever keeps one where it is. A
share that grows past a conversation's bucket does not change its revision under way; it changes when the conversation
has been still for `IDLE_S`. A share that falls is a rollback: then every request goes to the old revision at once, also
of conversations that the new one has begun.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from services.shared.catalog import CatalogView, RolloutItem
from services.shared.split import Arm, arm_of, bucket_of

IDLE_S = 600.0
MAX_CONVERSATIONS = 10_000  # of one tenant in one rollout


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
    """Conversations that the old revision has begun to answer. Times in seconds on the caller's monotonic clock.

    Each tenant has a memory of its own in each rollout, of at most `most` conversations, so none makes another forget.
    """

    def __init__(self, *, most: int = MAX_CONVERSATIONS, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        # (rollout, tenant) → digest of the session → when it was last heard of; longest ago first.
        self._old: dict[tuple[str, str], OrderedDict[bytes, float]] = {}

    def __len__(self) -> int:
        return sum(len(known) for known in self._old.values())

    def settle(self, item: RolloutItem, arm: Arm, *, tenant: str, session: str, now: float) -> Arm:
        """Returns the arm of a conversation's next request, and remembers it. Without a session there is none."""
        if not session:
            return arm
        known = self._old.setdefault((item.name, tenant), OrderedDict())
        key = hashlib.sha256(session.encode()).digest()[:16]
        heard = known.pop(key, None)
        if arm == "new" and (heard is None or now - heard > self._idle_s):
            return "new"
        known[key] = now
        while known and (len(known) > self._most or next(iter(known.values())) < now - self._idle_s):
            known.popitem(last=False)
        # It is no control any more: its like are in the new arm.
        return "old" if arm == "new" else arm

    def forget(self, view: CatalogView) -> None:
        """Drops what is remembered of rollouts that no longer run."""
        running = {item.name for item in view.rollouts.values()}
        self._old = {key: known for key, known in self._old.items() if key[0] in running}
