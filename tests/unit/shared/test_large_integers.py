"""An integer without a canonical form, in whatever is read as signed or logged: each parser says so with its own error."""

from collections.abc import Callable

import pytest

from loraport.bundle.envelope import SigningKey, sign_envelope
from loraport.log.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from loraport.log.leaf import LeafError, parse_leaf
from loraport.trust import delegation
from loraport.trust.root import RootError, parse_root
from services.shared.statements import Record, StatementError, open_statement

KEY = SigningKey.generate()
TRUSTED = {KEY.key_id: KEY.public_pem}


def _sealed(payload_type: str, payload: bytes) -> bytes:
    return sign_envelope(payload_type, payload, KEY)


PARSERS: dict[str, tuple[Callable[[bytes], object], type[Exception]]] = {
    "leaf": (parse_leaf, LeafError),
    "root": (parse_root, RootError),
    "statement": (lambda payload: open_statement(Record, _sealed(Record.TYPE, payload), TRUSTED), StatementError),
    "checkpoint": (
        lambda payload: open_checkpoint(_sealed(Checkpoint.TYPE, payload), TRUSTED, now=0.0),
        CheckpointError,
    ),
    "delegation": (
        lambda payload: delegation.open_delegation(_sealed(delegation.PAYLOAD_TYPE, payload), TRUSTED),
        delegation.DelegationError,
    ),
}


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("number", [2**53, -(2**53), 10**16, 10**19, 10**20 - 1])
def test_an_integer_of_more_than_53_bits_ends_typed(parser: str, number: int) -> None:
    parse, error = PARSERS[parser]
    with pytest.raises(error, match=r"NUMBER_RANGE"):
        parse(b'{"time":%d}' % number)
