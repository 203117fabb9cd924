"""Which arm of a rollout a conversation falls into: a salted hash into 10,000 buckets, the same on every router. Pure.

    0 ........ w ........ 2w ......................... 10,000      w: the share of the new revision, in buckets
    |   new    | control  |             old            |

A growing share only ever moves buckets from old to new, so an arm that a unit has reached by hash is kept until the
share goes to zero. The control is the neighbour of the new arm and as large: a fresh sample of the old revision, whose
figures are compared with the new one's. With more than half the buckets new, it is what is left.

The salt is the rollout's own, so no two rollouts try their revision on the same unlucky users.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Literal

BUCKETS = 10_000

Arm = Literal["new", "control", "old"]
ARMS: tuple[Arm, ...] = ("new", "control", "old")
# The step that copies of requests belong to.
SHADOW_STEP = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One request of a rollout that has ended, as a router saw it; see `loraport.registry.v1.Observation`.

    Times are milliseconds, 0 when there is none. `bucket` is its conversation's: requests of one are alike.
    """

    arm: Arm
    first_token_ms: float
    per_token_ms: float
    ok: bool
    error_reason: str = ""
    output_tokens: int = 0
    repetition: float = 0.0
    cold: bool = False
    bucket: int = 0


def split_unit(*, session: str, user: str, request: str) -> str:
    """Returns what is split: the conversation where it has a name, else the user, else the one request.

    The three never meet: a session called like somebody's id is not that user.
    """
    if session:
        return f"session/{session}"
    return f"user/{user}" if user else f"request/{request}"


def bucket_of(salt: bytes, tenant: str, unit: str) -> int:
    """Returns the bucket, in [0, BUCKETS), of a tenant's unit. A tenant's id has no zero byte, so the pair is one."""
    digest = hmac.digest(salt, f"{tenant}\0{unit}".encode(), hashlib.sha256)
    return int.from_bytes(digest[:8], "big") % BUCKETS


def arm_of(bucket: int, share: int) -> Arm:
    """Returns the arm of a bucket while `share` buckets, in [0, BUCKETS], are new."""
    if bucket < share:
        return "new"
    return "control" if bucket < 2 * share else "old"
