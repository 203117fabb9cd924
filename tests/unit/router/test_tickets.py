"""One ticket lets many requests in, and never longer than its time, its key or an executor's trust lasts."""

from dataclasses import dataclass

import pytest

from loraport.bundle.envelope import EnvelopeError, SigningKey, signed_by
from services.router import tickets
from services.router.tickets import SHOWN_S, Tickets
from services.shared.statements import CLOCK_SKEW_S, MAX_TICKET_LIFE_S, Ticket, open_ticket

BASE = "sha256:" + "b" * 64
PIRATE = "sha256:" + "1" * 64


@dataclass
class Clock:
    now: float = 1_000_000.5

    def __call__(self) -> float:
        return self.now


class Rotating:
    """A signer whose key may change, or be gone."""

    def __init__(self) -> None:
        self.key: SigningKey | None = SigningKey.generate()
        self.signed = 0

    @property
    def _current(self) -> SigningKey:
        if self.key is None:
            raise EnvelopeError("SIGNER", "no key")
        return self.key

    @property
    def key_id(self) -> str:
        return self._current.key_id

    @property
    def public_pem(self) -> bytes:
        return self._current.public_pem

    def sign(self, data: bytes) -> tuple[str, bytes]:
        self.signed += 1
        return self._current.sign(data)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def signer() -> Rotating:
    return Rotating()


@pytest.fixture
def book(signer: Rotating, clock: Clock) -> Tickets:
    return Tickets(signer, clock)


def pirate(book: Tickets, tenant: str = "acme") -> bytes:
    return book.ticket(tenant=tenant, revision_id=PIRATE, base_id=BASE)


def test_requests_share_a_ticket_and_tenants_do_not(book: Tickets, signer: Rotating, clock: Clock) -> None:
    first = pirate(book)
    clock.now += SHOWN_S - 1
    assert pirate(book) == first
    assert signer.signed == 1
    others = {
        pirate(book, "globex"),
        book.ticket(tenant="acme", revision_id="", base_id=BASE),
        book.ticket(tenant="acme", revision_id=PIRATE, base_id=PIRATE),
    }
    assert len(others | {first}) == 4
    trusted = {signer.key_id: signer.public_pem}
    assert open_ticket(first, trusted, now=clock.now) == Ticket("acme", PIRATE, BASE, 1_000_000 + MAX_TICKET_LIFE_S)


def test_a_ticket_that_is_shown_has_most_of_its_life_before_it(book: Tickets, signer: Rotating, clock: Clock) -> None:
    trusted = {signer.key_id: signer.public_pem}
    for _ in range(200):
        clock.now += 1.7
        left = open_ticket(pirate(book), trusted, now=clock.now).expires - clock.now
        assert MAX_TICKET_LIFE_S - SHOWN_S - 1 < left <= MAX_TICKET_LIFE_S
        assert left > CLOCK_SKEW_S


@pytest.mark.parametrize("off_by", [-3600.0, -0.1, SHOWN_S, 3600.0])
def test_a_clock_that_is_set_makes_tickets_of_its_new_time(
    book: Tickets, clock: Clock, signer: Rotating, off_by: float
) -> None:
    pirate(book)
    clock.now += off_by
    pirate(book)
    assert signer.signed == 2


def test_another_key_signs_at_once_and_no_key_gives_nothing(book: Tickets, signer: Rotating) -> None:
    first = pirate(book)
    signer.key = SigningKey.generate()
    again = pirate(book)
    assert signed_by(again) == (signer.key.key_id,) != signed_by(first)
    signer.key = None
    with pytest.raises(EnvelopeError):
        pirate(book)


def test_what_an_executor_did_not_take_is_not_shown_again(book: Tickets, signer: Rotating) -> None:
    pirate(book)
    pirate(book, "globex")
    book.forget(tenant="acme", revision_id=PIRATE, base_id=BASE)
    book.forget(tenant="nobody", revision_id=PIRATE, base_id=BASE)
    pirate(book)
    pirate(book, "globex")
    assert signer.signed == 3


def test_tickets_that_are_kept_have_a_bound(
    book: Tickets, signer: Rotating, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(tickets, "MAX_KEPT", 3)
    for number in range(10):
        pirate(book, f"t{number}")
    assert len(book._kept) == 3
    # Made anew, a ticket is the newest.
    clock.now += SHOWN_S
    pirate(book, "t7")
    pirate(book, "new")
    signed = signer.signed
    pirate(book, "t7")
    assert signer.signed == signed
