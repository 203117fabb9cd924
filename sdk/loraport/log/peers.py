"""Compares the logs that peers were told with the one that the registry shows here. Pure.

A registry that tells two histories keeps each peer happy for itself. Their checkpoints, side by side, are its own
signatures under both. What is found of a peer:

    OK           its log is where the registry's begins
    UNREACHABLE  it did not answer; nothing is known
    NONE         it believes no checkpoint yet, as just after a start
    OLDER        its log is where the registry's begins, and an earlier release signed its checkpoint: the peer is of
                 that release, as during an upgrade, and was not told what was taken back
    FORGED       what it shows is not signed by the registry's timestamp keys, or is not what it claims     ALARM
    SPLIT_VIEW   its log is not where the registry's begins, or another peer has another of the same size   ALARM
    ROLLBACK     its log is longer than the one that the registry shows                                     ALARM
    STALE        its checkpoint has expired: it did not hear of what happened since                         ALARM
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loraport.log.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from loraport.log.merkle import verify_consistency

ALARMS = frozenset({"FORGED", "SPLIT_VIEW", "ROLLBACK", "STALE"})

# From (old size, new size) to the registry's proof, None when it has none to give.
Prove = Callable[[int, int], Sequence[bytes] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A peer's answer: what it claims, and the envelope that proves it. `fault` says why there is no answer."""

    peer: str
    tree_size: int = 0
    root_hash: str = ""
    envelope: bytes = b""
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is found of a peer. `checkpoint` is what its envelope says, None when that proves nothing."""

    peer: str
    code: str
    detail: str = ""
    checkpoint: Checkpoint | None = None
    envelope: bytes = b""

    @property
    def alarm(self) -> bool:
        """True when somebody has to act."""
        return self.code in ALARMS


def compare(
    answers: Sequence[Told], own: Checkpoint, *, trusted: Mapping[str, bytes], now: float, prove: Prove
) -> list[Standing]:
    """Returns what is found of each peer, in the order of the answers.

    `own` is the registry's checkpoint, asked for after the peers had answered; `trusted` are the keys that sign
    checkpoints (key id → PEM).
    """
    opened = [_open(answer, trusted, now) for answer in answers]
    roots: defaultdict[int, set[str]] = defaultdict(set, {own.tree_size: {own.root_hash}})
    for item in opened:
        if item.checkpoint is not None:
            roots[item.checkpoint.tree_size].add(item.checkpoint.root_hash)
    continued: dict[tuple[int, str], tuple[str, str]] = {}
    found = []
    for item in opened:
        seen = item.checkpoint
        if seen is not None:
            log = seen.tree_size, seen.root_hash
            if log not in continued:
                continued[log] = _continued(seen, own, len(roots[seen.tree_size]), prove)
            code, detail = continued[log]
            if code == "OK" and seen.expires < now:
                code, detail = "STALE", f"its checkpoint expired {now - seen.expires:.0f} s ago"
            if seen.older and code in ("OK", "STALE"):
                detail = f"{detail}; " if detail else ""
                code = "OLDER" if code == "OK" else code
                detail = f"{detail}it is of an earlier release: replace it"
            item = replace(item, code=code, detail=detail)
        found.append(item)
    return found


def _open(answer: Told, trusted: Mapping[str, bytes], now: float) -> Standing:
    """Returns a standing with the checkpoint that the answer proves, or with the reason that it proves none."""
    if answer.fault:
        return Standing(peer=answer.peer, code="UNREACHABLE", detail=answer.fault)
    if not answer.envelope and not answer.tree_size:
        return Standing(peer=answer.peer, code="NONE", detail="it believes no checkpoint yet")
    forged = Standing(peer=answer.peer, code="FORGED", envelope=answer.envelope)
    try:
        seen = open_checkpoint(answer.envelope, trusted, now=now, older=True)
    except CheckpointError as error:
        return replace(forged, detail=f"its checkpoint proves nothing: {error}")
    if (seen.tree_size, seen.root_hash) != (answer.tree_size, answer.root_hash):
        return replace(forged, detail="its checkpoint is not of the log that it claims")
    return Standing(peer=answer.peer, code="OK", checkpoint=seen, envelope=answer.envelope)


def _continued(seen: Checkpoint, own: Checkpoint, roots_of_size: int, prove: Prove) -> tuple[str, str]:
    """Returns OK, or the code and detail of what keeps the registry's log from being a peer's log and more."""
    if roots_of_size > 1:
        return "SPLIT_VIEW", f"two logs of {seen.tree_size} leaves were signed"
    if seen.tree_size > own.tree_size:
        return "ROLLBACK", f"the registry shows {own.tree_size} leaves only"
    if seen.tree_size == own.tree_size:
        return "OK", ""
    proof = prove(seen.tree_size, own.tree_size) if seen.tree_size else ()
    old, new = bytes.fromhex(seen.root_hash), bytes.fromhex(own.root_hash)
    if proof is None or not verify_consistency(seen.tree_size, own.tree_size, proof, old, new):
        return "SPLIT_VIEW", f"the registry's {own.tree_size} leaves do not begin with its {seen.tree_size}"
    return "OK", ""
