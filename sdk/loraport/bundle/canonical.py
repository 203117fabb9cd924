"""Canonical JSON (RFC 8785) for what is signed, and strict JSON for what is read.

Signed documents hold objects, arrays, strings, integers of at most 53 bits, booleans and null.
They hold no floats: the canonical form of a float depends on a number formatter, so a float
travels as the text of `float.hex` instead.
"""

import json
import math
from typing import Any, NoReturn

import rfc8785

MAX_SAFE_INT = 2**53 - 1
_MAX_INT_DIGITS = 20
_encode = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


class CanonicalError(ValueError):
    """A value that has no canonical form here: a float, a large integer, a lone surrogate, a foreign type."""


class StrictJsonError(ValueError):
    """JSON that is malformed, ambiguous or too large to be worth reading.

    `code` is one of NOT_UTF8, NOT_JSON, DUPLICATE_KEY, TOO_LARGE, TOO_DEEP, NON_FINITE_NUMBER,
    NUMBER_RANGE, FLOAT_NOT_ALLOWED, LONE_SURROGATE. `detail` is one line for a person; `subject`
    is the key that occurs twice, or empty.
    """

    def __init__(self, code: str, detail: str, subject: str = "") -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.subject = subject


def canonical(value: Any) -> bytes:
    """Returns the RFC 8785 bytes of `value`.

    Raises:
        CanonicalError: `value` holds something that has no canonical form here.
    """
    plain = _require_canonical(value)
    try:
        return _encode(value).encode() if plain else rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise CanonicalError(f"no canonical form: {error}") from error


def _require_canonical(value: Any) -> bool:
    """Returns whether all keys are ASCII: only those does the standard library's encoder order as RFC 8785 says. It is
    written in C, and otherwise makes the same bytes."""
    plain = True
    pending = [value]
    while pending:
        item = pending.pop()
        if item is None or isinstance(item, str):
            continue
        if isinstance(item, float):
            raise CanonicalError(f"floats are not signed, write the text of float.hex: {item!r}")
        if isinstance(item, int):
            if abs(item) > MAX_SAFE_INT:
                raise CanonicalError("an integer needs more than 53 bits")
        elif isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise CanonicalError("object keys must be strings")
                plain = plain and key.isascii()
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        else:
            raise CanonicalError(f"a {type(item).__name__} has no canonical form")
    return plain


def load_strict(
    data: bytes, *, max_bytes: int, max_depth: int, allow_floats: bool = False, wide_integers: bool = False
) -> Any:
    """Reads one JSON document that every JSON parser must read the same way.

    Refused are duplicate keys at any level, NaN and Infinity, numbers that overflow a double, lone
    surrogates, a byte-order mark, floats unless `allow_floats`, and integers of more than 53 bits,
    with `wide_integers` of more than 20 digits. With neither, what is read has a canonical form. An
    object or array in the document is at depth 1, one within it at depth 2.

    Raises:
        StrictJsonError: the document is refused.
    """
    if len(data) > max_bytes:
        raise StrictJsonError("TOO_LARGE", f"{len(data)} bytes, the limit is {max_bytes}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictJsonError("NOT_UTF8", f"invalid UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_object,
            parse_constant=_refuse_constant,
            parse_float=_finite_float if allow_floats else _refuse_float,
            parse_int=_wide_int if wide_integers else _safe_int,
        )
    except RecursionError:
        raise StrictJsonError("TOO_DEEP", f"nested deeper than {max_depth} levels") from None
    except json.JSONDecodeError as error:
        raise StrictJsonError("NOT_JSON", f"{error.msg} at character {error.pos}") from None
    _check_depth(value, max_depth)
    if "\\u" in text:
        _refuse_surrogates(value)
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise StrictJsonError("DUPLICATE_KEY", f"the key {twice!r:.300} occurs twice in one object", twice)
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise StrictJsonError("NON_FINITE_NUMBER", f"{text} is not a JSON number")


def _refuse_float(text: str) -> NoReturn:
    raise StrictJsonError("FLOAT_NOT_ALLOWED", f"only integers are allowed here, not {text:.40}")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError("NUMBER_RANGE", f"{text:.40} overflows a double")
    return value


def _wide_int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS:
        raise StrictJsonError("NUMBER_RANGE", f"an integer of {len(text)} digits")
    return int(text)


def _safe_int(text: str) -> int:
    value = _wide_int(text)
    if abs(value) > MAX_SAFE_INT:
        raise StrictJsonError("NUMBER_RANGE", f"the integer {text} needs more than 53 bits")
    return value


def _check_depth(value: Any, max_depth: int) -> None:
    level: list[Any] = [value]
    for _ in range(max_depth):
        inner = [child for item in level for child in _children(item)]
        if not inner:
            return
        level = inner
    if any(isinstance(item, dict | list) for item in level):
        raise StrictJsonError("TOO_DEEP", f"nested deeper than {max_depth} levels")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _refuse_surrogates(value: Any) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise StrictJsonError("LONE_SURROGATE", f"half of a surrogate pair in {item!r:.80}") from None
