"""API keys as text."""

import hashlib
import hmac

from services.registry.api_keys import KEY_ID_ALPHABET, SECRET_ALPHABET, make_api_key
from services.registry.ports import SystemRandomness


class First:
    """Always the first character."""

    def text(self, alphabet: str, length: int) -> str:
        return alphabet[0] * length


def test_a_key_has_its_form_and_is_kept_as_a_keyed_hash() -> None:
    made = make_api_key(First(), b"pepper")
    assert made.text == f"lk_{'a' * 10}_{'a' * 43}"
    assert made.key_id == "a" * 10
    assert made.secret_hmac == hmac.digest(b"pepper", made.text.encode(), hashlib.sha256)
    assert made.secret_hmac != make_api_key(First(), b"other").secret_hmac


def test_a_key_does_not_show_its_secret() -> None:
    assert make_api_key(First(), b"pepper").text not in repr(make_api_key(First(), b"pepper"))


def test_the_systems_randomness_stays_in_the_alphabet() -> None:
    text = SystemRandomness().text(SECRET_ALPHABET, 2000)
    assert set(text) == set(SECRET_ALPHABET)
    assert len(text) == 2000
    assert set(SystemRandomness().text(KEY_ID_ALPHABET, 2000)) == set(KEY_ID_ALPHABET)
