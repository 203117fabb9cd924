import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import SigningKey, sign_envelope
from services.shared.statements import (
    Record,
    StatementError,
    Ticket,
    UploadSession,
    Verification,
    open_session,
    open_statement,
    open_ticket,
    seal,
)

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
TRUSTED = {KEY.key_id: KEY.public_pem}
DIGEST = "sha256:" + "0" * 64
NOW = 1_000_000
TICKET = Ticket("acme", DIGEST, DIGEST, NOW + 30)
SESSION = UploadSession("u1", "acme", DIGEST, "tiny", DIGEST, 10, DIGEST, NOW + 600)
VERIFICATION = Verification(DIGEST, "acme", DIGEST, DIGEST, 10, False, (("NON_FINITE", "NaN", "x"),), (), "loader", NOW)
RECORD = Record(DIGEST, "acme", "bot", 3, DIGEST, DIGEST, 10, "ACTIVE", 7, NOW)
ALL = [TICKET, SESSION, VERIFICATION, RECORD]


@pytest.mark.parametrize("statement", ALL, ids=lambda s: type(s).__name__)
def test_what_is_sealed_is_opened(statement: object) -> None:
    assert open_statement(type(statement), seal(statement, KEY), TRUSTED) == statement


@pytest.mark.parametrize("statement", ALL, ids=lambda s: type(s).__name__)
def test_only_the_trusted_key_and_the_right_kind_open(statement: object) -> None:
    with pytest.raises(StatementError, match="UNTRUSTED"):
        open_statement(type(statement), seal(statement, OTHER), TRUSTED)
    for kind in {Ticket, UploadSession, Verification, Record} - {type(statement)}:
        with pytest.raises(StatementError, match="PAYLOAD_TYPE"):
            open_statement(kind, seal(statement, KEY), TRUSTED)


@given(st.data())
def test_no_changed_byte_opens(data: st.DataObject) -> None:
    envelope = bytearray(seal(TICKET, KEY))
    index = data.draw(st.integers(0, len(envelope) - 1))
    envelope[index] ^= data.draw(st.integers(1, 255))
    try:
        opened = open_statement(Ticket, bytes(envelope), TRUSTED)
    except StatementError:
        return
    # Base64 has spare bits in its last character: such a change alters no signed byte.
    assert opened == TICKET


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": 1},
        {"expires": "soon"},
        {"expires": True},
        {"extra": 1},
    ],
)
def test_signed_nonsense_is_refused(change: dict) -> None:
    value = dataclasses.asdict(TICKET) | change
    with pytest.raises(StatementError):
        open_statement(Ticket, sign_envelope(Ticket.TYPE, canonical(value), KEY), TRUSTED)


def test_signed_but_not_canonical_is_refused() -> None:
    payload = b" " + canonical(dataclasses.asdict(TICKET))
    with pytest.raises(StatementError, match="canonical"):
        open_statement(Ticket, sign_envelope(Ticket.TYPE, payload, KEY), TRUSTED)


def test_time_limits() -> None:
    envelope = seal(TICKET, KEY)
    assert open_ticket(envelope, TRUSTED, now=NOW) == TICKET
    with pytest.raises(StatementError, match="expired"):
        open_ticket(envelope, TRUSTED, now=NOW + 36)
    with pytest.raises(StatementError, match="too long"):
        open_ticket(seal(dataclasses.replace(TICKET, expires=NOW + 66), KEY), TRUSTED, now=NOW)
    with pytest.raises(StatementError, match="expired"):
        open_session(seal(SESSION, KEY), TRUSTED, now=NOW + 606)
