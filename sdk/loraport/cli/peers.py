"""`loraport log peers`: which log each service believes, compared with the one that the registry shows here."""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraport.cli.views import print_rows, say

if TYPE_CHECKING:
    from loraport.admin import AdminClient
    from loraport.log.checkpoint import Checkpoint
    from loraport.log.peers import Standing

# A key that was replaced, or a registry that was down, reaches the peers with the catalog, some moments later.
TRIES, PAUSE_S = 8, 1.0
COLUMNS = ("peer", "standing", "tree_size", "root_hash", "age_s", "detail")


def look(
    data: Path, admin: "AdminClient", newest: "Callable[[], tuple[Checkpoint, Mapping[str, bytes]]]"
) -> "list[Standing]":
    """Asks every service of the stack at `data` which log it believes; an empty list when there are none.

    `newest` returns the registry's checkpoint of now, and the keys that checkpoints count by.
    """
    from loraport.dev.layout import read_endpoints
    from loraport.log.peers import compare
    from loraport.presence import PresenceClient

    if "loader" not in read_endpoints(data):
        return []
    found: list[Standing] = []
    with PresenceClient.local(data) as presence:
        for number in range(TRIES):
            if number:
                time.sleep(PAUSE_S)
            # The peers first: whatever they have seen by then, the registry must show.
            answers = presence.logs()
            own, keys = newest()
            found = compare(answers, own, trusted=keys, now=time.time(), prove=_prover(admin))
            if not any(item.code in ("FORGED", "STALE") for item in found):
                break
    return found


def _prover(admin: "AdminClient") -> Callable[[int, int], Sequence[bytes] | None]:
    from loraport.errors import InvalidArgumentError

    def prove(old: int, new: int) -> Sequence[bytes] | None:
        try:
            return tuple(admin.consistency_proof(old, new).hashes)
        except InvalidArgumentError:
            return None

    return prove


def rows_of(found: "Sequence[Standing]") -> list[dict[str, Any]]:
    """Returns standings as JSON objects; `checkpoint` is the signed envelope itself, which anybody can check."""
    now = time.time()
    return [
        {
            "peer": item.peer,
            "standing": item.code,
            "alarm": item.alarm,
            "tree_size": item.checkpoint and item.checkpoint.tree_size,
            "root_hash": item.checkpoint and item.checkpoint.root_hash,
            "age_s": item.checkpoint and max(0, round(now - item.checkpoint.issued)),
            "detail": item.detail or None,
            "checkpoint": base64.b64encode(item.envelope).decode("ascii") or None,
        }
        for item in found
    ]


def show(found: "Sequence[Standing]", *, as_json: bool) -> None:
    """Prints a table of peers, and a line for each alarm."""
    print_rows(rows_of(found), as_json=as_json, columns=COLUMNS, empty="no peers: the stack has no loader or executor")
    if not as_json:
        say_alarms(found)


def say_alarms(found: "Sequence[Standing]") -> None:
    """Prints a line for each peer that somebody has to look at."""
    for item in found:
        if item.alarm:
            say(f"ALARM: {item.peer}: {item.code}: {item.detail}")
