"""The table of codes and the code agree."""

import re
from pathlib import Path

import loraport.bundle
from loraport.bundle.codes import VIOLATIONS, WARNINGS, explain

SOURCE = "".join(
    path.read_text()
    for path in sorted(Path(next(iter(loraport.bundle.__path__))).glob("*.py"))
    if path.name != "codes.py"
)
JSON_CODES = (
    "NOT_UTF8", "NOT_JSON", "DUPLICATE_KEY", "TOO_LARGE", "TOO_DEEP", "NON_FINITE_NUMBER", "NUMBER_RANGE",
    "FLOAT_NOT_ALLOWED", "LONE_SURROGATE",
)  # fmt: skip


def test_every_code_that_is_emitted_is_explained() -> None:
    emitted = set(re.findall(r'(?:Violation|_unset|_absent)\(\s*"([A-Z][A-Z0-9_]+)"', SOURCE))
    assert len(emitted) > 50
    assert emitted <= VIOLATIONS.keys() | WARNINGS.keys()
    for part in ("CONFIG", "HEADER"):
        for code in JSON_CODES:
            # The config may have floats.
            assert f"{part}_{code}" in VIOLATIONS or (part, code) == ("CONFIG", "FLOAT_NOT_ALLOWED")


def test_every_explained_code_is_emitted() -> None:
    made = {f"{part}_{code}" for part in ("CONFIG", "HEADER") for code in JSON_CODES}
    assert not {code for code in VIOLATIONS | WARNINGS if f'"{code}"' not in SOURCE} - made


def test_codes_are_upper_snake_and_lines_are_short() -> None:
    assert not VIOLATIONS.keys() & WARNINGS.keys()
    for code, line in (VIOLATIONS | WARNINGS).items():
        assert re.fullmatch(r"[A-Z][A-Z0-9_]{2,62}", code)
        assert "\n" not in line
        assert len(line) <= 120
        assert explain(code) == line
