"""Tickets for executors: one lets all requests of a tenant for a revision in, for a part of its minute.

Whoever has a router's certificate could always show one again within its minute, so nothing is lost by that; to sign
one for every request was a tenth of what a stream costs a router.
"""

from collections.abc import Callable
from dataclasses import dataclass

from loraport.bundle.envelope import Signer
from services.shared.statements import MAX_TICKET_LIFE_S, Ticket, seal

# A ticket is shown this long. What is left of its life is for the way, and for executors whose clocks differ.
SHOWN_S = 20.0
# Tickets kept at most, about 600 bytes each; the oldest goes first.
MAX_KEPT = 8192


@dataclass(frozen=True, slots=True)
class _Kept:
    envelope: bytes
    made: float
    key_id: str


class Tickets:
    """`now` is seconds since the epoch."""

    def __init__(self, signer: Signer, now: Callable[[], float]) -> None:
        self._signer = signer
        self._now = now
        self._kept: dict[tuple[str, str, str], _Kept] = {}

    def ticket(self, *, tenant: str, revision_id: str, base_id: str) -> bytes:
        """Returns a ticket with most of its life before it, signed by the key that is this router's now.

        Raises:
            EnvelopeError: SIGNER, this router has no key that counts.
        """
        now, key, key_id = self._now(), (tenant, revision_id, base_id), self._signer.key_id
        kept = self._kept.get(key)
        # A clock that is set back has made tickets of the future, which no executor takes.
        if kept is not None and kept.key_id == key_id and 0 <= now - kept.made < SHOWN_S:
            return kept.envelope
        self._kept.pop(key, None)
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        ticket = Ticket(tenant, revision_id, base_id, expires=int(now) + MAX_TICKET_LIFE_S)
        self._kept[key] = _Kept(seal(ticket, self._signer), now, key_id)
        return self._kept[key].envelope

    def forget(self, *, tenant: str, revision_id: str, base_id: str) -> None:
        """An executor did not take it: the next one is made anew."""
        self._kept.pop((tenant, revision_id, base_id), None)
