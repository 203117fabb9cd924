"""The registry's short-lived word about its log, and the rules of believing it. Pure.

A checkpoint says how large the log is and what its root is, which of its leaves take something back, how new catalog
and revocations are, and until when that may be relied on. Two questions are answered here, each by one function and one
table:

    freshness   may something new be loaded (FRESH), may what is loaded go on (STALE), or neither (DEAD)
    judge       does a new checkpoint follow what was seen before (a floor that only rises), or is it an attack

`judge` says what is to be proved when the log has grown; who has the proof decides with `merkle.verify_consistency`.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict
from loraport.bundle.envelope import EnvelopeError, Signer, sign_envelope, verify_envelope
from loraport.log.merkle import EMPTY_ROOT
from loraport.log.restrictions import FIRST_HEAD

MAX_LIFE_S = 600
# A clock that is this far behind the registry's is taken for a slow clock, not for an attack.
MAX_SKEW_S = 60
MAX_CHECKPOINT_BYTES = 4096
_HEX = re.compile(r"[0-9a-f]{64}")


class CheckpointError(ValueError):
    """A checkpoint that proves nothing; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The statement. Times are seconds since the Unix epoch; `root_hash` is 64 hex digits.

    `revocation_epoch` is the size of the log when the newest revocation was in it. `restriction_count` and
    `restriction_head` (64 hex digits) are length and hash of `loraport.log.restrictions`; a checkpoint of an earlier
    release does not say them (0 and an empty text).
    """

    tree_size: int
    root_hash: str
    catalog_epoch: int
    revocation_epoch: int
    restriction_count: int
    restriction_head: str
    issued: int
    expires: int

    TYPE = "application/vnd.loraport.checkpoint+json"

    @property
    def older(self) -> bool:
        """True when an earlier release signed it: it does not say what was taken back."""
        return not self.restriction_head


_FIELDS = {field.name for field in dataclasses.fields(Checkpoint)}
# What checkpoints of earlier releases do not say. Who serves refuses them: they do not tell what was taken back.
_NEWER = {"restriction_count", "restriction_head"}
NO_RESTRICTIONS = FIRST_HEAD.hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What a checkpoint may not fall below: the highest that was ever accepted."""

    tree_size: int = 0
    root_hash: str = EMPTY_ROOT.hex()
    catalog_epoch: int = 0
    revocation_epoch: int = 0
    restriction_count: int = 0
    restriction_head: str = NO_RESTRICTIONS

    @classmethod
    def of(cls, kept: Mapping[str, object]) -> "Floor":
        """Returns the floor that a file has kept. What a later release kept besides is left out; one of an earlier
        release does not say what was taken back and begins anew there. Raises ValueError."""
        known = {"restriction_count": 0, "restriction_head": NO_RESTRICTIONS, **kept}
        values: dict[str, Any] = {field.name: known.get(field.name) for field in dataclasses.fields(cls)}
        if not _formed(values):
            raise ValueError("a field is missing or has the wrong form")
        return cls(**values)

    def raised(self, to: Checkpoint) -> "Floor":
        """Returns the floor after accepting a checkpoint that `judge` did not refuse."""
        return Floor(
            tree_size=to.tree_size,
            root_hash=to.root_hash,
            catalog_epoch=to.catalog_epoch,
            revocation_epoch=to.revocation_epoch,
            restriction_count=self.restriction_count if to.older else to.restriction_count,
            restriction_head=self.restriction_head if to.older else to.restriction_head,
        )


class Freshness(StrEnum):
    """What the newest checkpoint allows."""

    FRESH = "FRESH"
    STALE = "STALE"
    DEAD = "DEAD"


class Judgement(StrEnum):
    """What a new checkpoint is, compared with the floor."""

    SAME = "SAME"  # the same log; believe it
    GROWN = "GROWN"  # a longer log; believe it once it is proved to extend the floor's
    ROLLBACK = "ROLLBACK"  # older than what was seen
    SPLIT_VIEW = "SPLIT_VIEW"  # another history of the same length


def freshness(*, now: float, expires: float, grace_s: float) -> Freshness:
    """Returns what may be done with a checkpoint.

    | now | new loads | what is loaded |
    | --- | --- | --- |
    | up to `expires` | yes | serves |
    | up to `expires` + `grace_s` | no | serves |
    | later | no | refuses |
    """
    if now <= expires:
        return Freshness.FRESH
    return Freshness.STALE if now <= expires + grace_s else Freshness.DEAD


def judge(new: Checkpoint, floor: Floor) -> Judgement:
    """Returns what a checkpoint is, compared with the floor. Nothing that has an epoch ever goes back.

    What one of an earlier release does not say is not compared.
    """
    taken_back = floor.restriction_count if new.older else new.restriction_count
    steps = (
        new.tree_size - floor.tree_size,
        new.catalog_epoch - floor.catalog_epoch,
        new.revocation_epoch - floor.revocation_epoch,
        taken_back - floor.restriction_count,
    )
    if min(steps) < 0:
        return Judgement.ROLLBACK
    same_list = new.older or new.restriction_head == floor.restriction_head
    if taken_back == floor.restriction_count and not same_list:
        return Judgement.SPLIT_VIEW
    if new.tree_size > floor.tree_size:
        return Judgement.GROWN
    return Judgement.SAME if new.root_hash == floor.root_hash else Judgement.SPLIT_VIEW


def seal_checkpoint(checkpoint: Checkpoint, key: Signer) -> bytes:
    """Returns the signed envelope of a checkpoint."""
    return sign_envelope(Checkpoint.TYPE, canonical(dataclasses.asdict(checkpoint)), key)


def open_checkpoint(envelope: bytes, trusted: Mapping[str, bytes], *, now: float, older: bool = False) -> Checkpoint:
    """Returns the checkpoint in `envelope`, signed by one of `trusted` (key id → PEM). It may have expired.

    `older` takes those of earlier releases, too: they are evidence of what was signed, and nothing to serve by.

    Raises:
        CheckpointError: the signature, the form, the fields or the times are not what they must be.
    """
    try:
        payload = verify_envelope(envelope, payload_type=Checkpoint.TYPE, trusted=trusted)
        value = load_strict(payload, max_bytes=MAX_CHECKPOINT_BYTES, max_depth=1)
        if canonical(value) != payload:
            raise CheckpointError("not in canonical form")
    except (EnvelopeError, StrictJsonError) as error:
        raise CheckpointError(error.code) from None
    fields = set(value) if isinstance(value, dict) else set()
    if fields == _FIELDS - _NEWER and not older:
        raise CheckpointError("it does not say what was taken back: its registry is of an older release")
    if fields not in (_FIELDS, _FIELDS - _NEWER):
        raise CheckpointError("fields are missing or unknown")
    if not _formed(value):
        raise CheckpointError("a field has the wrong form")
    checkpoint = Checkpoint(**{"restriction_count": 0, "restriction_head": "", **value})
    _require_possible(checkpoint, now)
    return checkpoint


def _formed(value: Mapping[str, Any]) -> bool:
    """Says whether what are hashes are 64 hex digits, and all else numbers that are not negative."""
    texts = value.keys() & {"root_hash", "restriction_head"}
    return all(type(value[name]) is int and value[name] >= 0 for name in value.keys() - texts) and all(
        isinstance(value[name], str) and _HEX.fullmatch(value[name]) for name in texts
    )


def _require_possible(checkpoint: Checkpoint, now: float) -> None:
    if checkpoint.revocation_epoch > checkpoint.tree_size:
        raise CheckpointError("revocation_epoch is beyond the log")
    if checkpoint.restriction_count > checkpoint.tree_size:
        raise CheckpointError("restriction_count is beyond the log")
    none = checkpoint.restriction_head == NO_RESTRICTIONS
    if not checkpoint.older and (checkpoint.restriction_count == 0) != none:
        raise CheckpointError("restriction_head is not that of a list of this length")
    if (checkpoint.tree_size == 0) != (checkpoint.root_hash == EMPTY_ROOT.hex()):
        raise CheckpointError("the root is not that of a log of this size")
    if not 0 < checkpoint.expires - checkpoint.issued <= MAX_LIFE_S:
        raise CheckpointError("valid for too long")
    if checkpoint.issued > now + MAX_SKEW_S:
        raise CheckpointError("issued in the future")
