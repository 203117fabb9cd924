"""Canonical JSON and strict JSON, one refusal per row."""

import math

import pytest

from loraport.bundle.canonical import CanonicalError, StrictJsonError, canonical, load_strict
from loraport.bundle.digest import is_digest, parse_digest, sha256_digest


def test_canonical_sorts_keys_and_drops_space() -> None:
    assert canonical({"b": [1, True, None], "a": "é"}) == '{"a":"é","b":[1,true,null]}'.encode()


@pytest.mark.parametrize(
    "value", [1.0, {"a": [0.5]}, math.nan, 2**53, -(2**53), "\ud800", {"\ud800": 1}, {1: 2}, b"x", {"a": {1, 2}}]
)
def test_canonical_refuses(value: object) -> None:
    with pytest.raises(CanonicalError):
        canonical(value)


def test_the_largest_integer_is_canonical() -> None:
    assert canonical(2**53 - 1) == b"9007199254740991"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"a":1,"a":1}', "DUPLICATE_KEY"),
        (b'[{"x":{"a":1,"a":2}}]', "DUPLICATE_KEY"),
        (b'{"a":1,"\\u0061":1}', "DUPLICATE_KEY"),
        (b"NaN", "NON_FINITE_NUMBER"),
        (b"[-Infinity]", "NON_FINITE_NUMBER"),
        (b"1e400", "NUMBER_RANGE"),
        (b"9007199254740992", "NUMBER_RANGE"),
        (b"-9007199254740992", "NUMBER_RANGE"),
        (b"1" * 20, "NUMBER_RANGE"),
        (b"1" * 21, "NUMBER_RANGE"),
        (b"1" * 5000, "NUMBER_RANGE"),
        (b'"\\ud800"', "LONE_SURROGATE"),
        (b'{"\\udc00":1}', "LONE_SURROGATE"),
        (b"\xff", "NOT_UTF8"),
        (b"\xed\xa0\x80", "NOT_UTF8"),
        (b"\xef\xbb\xbf{}", "NOT_JSON"),
        (b"{} {}", "NOT_JSON"),
        (b"", "NOT_JSON"),
        (b"{'a':1}", "NOT_JSON"),
        (b"[1,]", "NOT_JSON"),
        (b"[" * 5000, "TOO_DEEP"),
        (b"[" * 5000 + b"]" * 5000, "TOO_DEEP"),
        (b"[[[[[1]]]]]", "TOO_DEEP"),
        (b'{"a":{"a":{"a":{"a":{}}}}}', "TOO_DEEP"),
        (b" " * 20_001, "TOO_LARGE"),
    ],
)
def test_strict_json_refuses(data: bytes, code: str) -> None:
    with pytest.raises(StrictJsonError) as caught:
        load_strict(data, max_bytes=20_000, max_depth=4, allow_floats=True)
    assert caught.value.code == code


def test_strict_json_reads_what_is_plain() -> None:
    value = load_strict(
        b' {"a": [1.5, -0, {"b": null}], "\\ud83d\\ude00": ""} ', max_bytes=99, max_depth=3, allow_floats=True
    )
    assert value == {"a": [1.5, 0, {"b": None}], "😀": ""}


@pytest.mark.parametrize("value", [2**53 - 1, -(2**53 - 1)])
def test_what_has_a_canonical_form_is_read(value: int) -> None:
    assert load_strict(canonical(value), max_bytes=99, max_depth=1) == value


def test_what_others_write_may_have_wider_integers() -> None:
    assert load_strict(b"18446744073709551615", max_bytes=99, max_depth=1, wide_integers=True) == 2**64 - 1
    with pytest.raises(StrictJsonError, match="NUMBER_RANGE"):
        load_strict(b"1" * 21, max_bytes=99, max_depth=1, wide_integers=True)


def test_floats_are_refused_unless_allowed() -> None:
    with pytest.raises(StrictJsonError, match="FLOAT_NOT_ALLOWED"):
        load_strict(b"1.0", max_bytes=9, max_depth=1)


def test_digests_have_one_form() -> None:
    digest = sha256_digest(b"")
    assert digest == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert parse_digest(digest) == digest[7:]
    for wrong in ("", digest[:-1], digest.upper(), digest[7:], digest + "\n", None, 1, "sha512:" + "0" * 64):
        assert not is_digest(wrong)
    with pytest.raises(ValueError, match="not a digest"):
        parse_digest("sha256:short")
