"""Headers that are refused: lengths that lie, JSON with two readings, entries whose bytes are not theirs, bombs."""

import json
import struct
from collections.abc import Iterator

from tests.bundle_files import a_name, b_name
from tests.security.corpus import Q0, V1, Case, Kit, raw

A, B, LAST = a_name(Q0), b_name(Q0), b_name(V1)


def cases(kit: Kit) -> Iterator[Case]:
    """All cases about the first bytes of adapter_model.safetensors."""
    yield from _lengths(kit)
    yield from _texts(kit)
    yield from _entries(kit)
    yield from _layout(kit)
    yield from _bombs(kit)


def _lengths(kit: Kit) -> Iterator[Case]:
    header, data = kit.header()
    text = json.dumps(header)

    def case(name: str, code: str, offender: str, weights: bytes) -> Case:
        return kit.case("H5", f"length: {name}", code, offender, weights=weights)

    yield case("no bytes", "EMPTY_FILE", "adapter_model.safetensors", b"")
    yield case("one byte", "HEADER_LENGTH", "1 bytes", b"{")
    yield case("nothing behind it", "HEADER_LENGTH", "8 bytes", struct.pack("<Q", 64))
    yield case("zero", "HEADER_LENGTH", "0 bytes", raw(text, data, length=0))
    yield case("one", "HEADER_LENGTH", "1 bytes", raw(text, data, length=1))
    yield case("2^63", "HEADER_LENGTH", str(2**63), raw(text, data, length=2**63))
    yield case("2^64 - 1", "HEADER_LENGTH", str(2**64 - 1), raw(text, data, length=2**64 - 1))
    yield case("100 000 000", "HEADER_LENGTH", "100000000", raw(text, data, length=100_000_000))
    yield case("the file's own size", "HEADER_LENGTH", "header", raw(text, b"", length=len(text) + 16))
    yield case("big-endian", "HEADER_LENGTH", "header", struct.pack(">Q", len(text)) + text.encode() + data)
    yield case("four bytes wide", "HEADER_LENGTH", "header", struct.pack("<I", len(text)) + text.encode() + data)
    yield case("into the data", "HEADER_NOT_JSON", "}", raw(text, b"\x01" * len(data), length=len(text) + 64))
    yield case("short of the header", "HEADER_NOT_JSON", "}", raw(text, data, length=len(text) - 40))


def _texts(kit: Kit) -> Iterator[Case]:
    header, data = kit.header()
    text = json.dumps(header)
    inner = text[1:-1]

    def case(name: str, code: str, offender: str, content: str | bytes) -> Case:
        return kit.case("H5", f"header: {name}", code, offender, weights=raw(content, data))

    yield case("leading space", "HEADER_NOT_JSON", "{", " " + text)
    yield case("leading byte-order mark", "HEADER_NOT_JSON", "{", b"\xef\xbb\xbf" + text.encode())
    yield case("leading newline", "HEADER_NOT_JSON", "{", "\n" + text)
    yield case("trailing newline", "HEADER_NOT_JSON", "}", text + "\n")
    yield case("trailing zero bytes", "HEADER_NOT_JSON", "}", text + "\0\0\0\0")
    yield case("trailing tab", "HEADER_NOT_JSON", "}", text + "\t")
    yield case("a list", "HEADER_NOT_JSON", "{", f"[{text}]")
    yield case("two objects", "HEADER_NOT_JSON", "Extra data", text + text)
    yield case(
        "not UTF-8",
        "HEADER_NOT_UTF8",
        "UTF-8",
        text.replace("q_proj", "q\x7fproj", 1).encode().replace(b"\x7f", b"\xff"),
    )
    yield case("overlong UTF-8", "HEADER_NOT_UTF8", "UTF-8", text.encode().replace(b"q_proj", b"q\xc0\xafproj", 1))
    yield case("half a surrogate pair", "HEADER_LONE_SURROGATE", "surrogate", text.replace("q_proj", "\\udfff", 1))
    yield case("a float offset", "HEADER_FLOAT_NOT_ALLOWED", "0.0", text.replace("[0, ", "[0.0, ", 1))
    yield case("an exponent", "HEADER_FLOAT_NOT_ALLOWED", "1e2", text.replace("[0, ", "[1e2, ", 1))
    yield case("NaN in a shape", "HEADER_NON_FINITE_NUMBER", "NaN", text.replace("[0, ", "[NaN, ", 1))
    yield case(
        "an offset of 400 digits", "HEADER_NUMBER_RANGE", "400 digits", text.replace("[0, ", "[" + "1" * 400 + ", ", 1)
    )
    yield case("a tensor twice", "DUPLICATE_TENSOR", A, f'{{{inner}, "{A}": {json.dumps(header[A])}}}')
    yield case(
        "a tensor twice, one escaped", "DUPLICATE_TENSOR", A, f'{{{inner}, "{A[:-1]}\\u0074": {json.dumps(header[A])}}}'
    )
    yield case(
        "a field twice",
        "HEADER_DUPLICATE_KEY",
        "dtype",
        text.replace('"dtype": "F32"', '"dtype": "F16", "dtype": "F32"', 1),
    )
    yield case("metadata twice", "HEADER_DUPLICATE_KEY", "__metadata__", f'{{{inner}, "__metadata__": {{}}}}')
    yield case(
        "a key of the metadata twice",
        "HEADER_DUPLICATE_KEY",
        "format",
        text.replace('{"format": "pt"}', '{"format": "pt", "format": "np"}'),
    )
    for name, value in {
        "null": None, "a list": [], "a number in it": {"format": 1}, "an object in it": {"a": {}},
        "33 pairs": {str(number): "x" for number in range(33)}, "9 KiB": {"a": "x" * 9216},
    }.items():  # fmt: skip
        yield case(
            f"metadata is {name}", "HEADER_METADATA", "__metadata__", json.dumps({**header, "__metadata__": value})
        )


def _entries(kit: Kit) -> Iterator[Case]:
    header, data = kit.header()
    begin, end = header[A]["data_offsets"]
    rank, inputs = header[A]["shape"]

    def case(name: str, code: str, offender: str = A, source: str = "H5", **changes: object) -> Case:
        return kit.case(source, f"entry: {name}", code, offender, weights=kit.entry(**changes))

    yield case("unknown field", "HEADER_ENTRY", strides=[1, 1])
    yield case("dtype null", "HEADER_ENTRY", dtype=None)
    yield case("shape null", "HEADER_ENTRY", shape=None)
    yield case("shape holds true", "HEADER_ENTRY", shape=[True, inputs])
    yield case("shape holds text", "HEADER_ENTRY", shape=["2", inputs])
    yield case("one offset", "HEADER_ENTRY", data_offsets=[begin])
    yield case("three offsets", "HEADER_ENTRY", data_offsets=[begin, end, end])
    yield case("offsets an object", "HEADER_ENTRY", data_offsets={"begin": begin})
    yield case("offset true", "HEADER_ENTRY", data_offsets=[False, end])
    yield case("unknown dtype", "UNKNOWN_DTYPE", dtype="FP32")
    yield case("dtype in small letters", "UNKNOWN_DTYPE", dtype="bf16")
    yield case("dtype with a space", "UNKNOWN_DTYPE", dtype="F32 ")
    for dtype in ("F64", "I8", "I64", "U16", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "C64"):
        yield case(f"dtype {dtype}", "UNSUPPORTED_DTYPE", f"dtype {dtype}", "G1", dtype=dtype)
    yield case("begin after end", "HEADER_OFFSETS", data_offsets=[end, begin])
    yield case("negative begin", "HEADER_OFFSETS", data_offsets=[-end, 0])
    yield case("a byte short", "HEADER_OFFSETS", data_offsets=[begin, end - 1])
    yield case("a row more than its bytes", "HEADER_OFFSETS", shape=[rank + 1, inputs])
    yield case("product wraps 64 bits", "HEADER_OFFSETS", shape=[2**20, 2**20, 2**20, 2**4], data_offsets=[0, 0])
    yield case("no dimension", "HEADER_OFFSETS", shape=[])
    yield case("zero rows", "HEADER_SHAPE", source="§4", shape=[0, inputs], data_offsets=[0, 0])
    yield case("negative rows", "HEADER_SHAPE", shape=[-rank, -inputs])
    yield case("2^64 - 1 rows of nothing", "HEADER_SHAPE", shape=[2**64 - 1, 0], data_offsets=[0, 0])
    yield case("nine dimensions", "HEADER_SHAPE", shape=[1] * 9)
    missing = {**header, A: {key: value for key, value in header[A].items() if key != "dtype"}}
    yield kit.case("H5", "entry: no dtype", "HEADER_ENTRY", A, weights=raw(json.dumps(missing), data))
    yield kit.case("H5", "entry: a list", "HEADER_ENTRY", A, weights=raw(json.dumps({**header, A: [0, end]}), data))
    names = {
        "climbs": "../../../../etc/cron.d/x", "absolute": "/etc/passwd", "backslash": "..\\..\\x", "zero byte": "a\0b", "empty": "",
        "newline": "a\nb", "empty part": "a..b", "Cyrillic": "base_model.model.l\u043era_A", "right-to-left": "a\u202eb",
        "percent": "..%2f..%2fx", "5000 letters": "x" * 5000,
    }  # fmt: skip
    for what, name in names.items():
        content = raw(json.dumps({**header, name: header[A]}), data)
        yield kit.case("H1", f"name: {what}", "HEADER_NAME", repr(name)[1:9] if name else "''", weights=content)


def _layout(kit: Kit) -> Iterator[Case]:
    header, data = kit.header()
    text = json.dumps(header)
    begin, end = header[LAST]["data_offsets"]
    moved = {
        name: entry if name == "__metadata__" else {**entry, "data_offsets": [at + 8 for at in entry["data_offsets"]]}
        for name, entry in header.items()
    }
    split = {**header, LAST: {**header[LAST], "data_offsets": [begin + 16, end + 16]}}

    def case(name: str, codes: str, offender: str, weights: bytes, source: str = "H5") -> Case:
        return kit.case(source, f"layout: {name}", codes, offender, weights=weights)

    yield case(
        "overlap by one element",
        "HEADER_OVERLAP HEADER_TRAILING_BYTES",
        LAST,
        kit.entry(LAST, data_offsets=[begin - 4, end - 4]),
    )
    yield case(
        "two tensors of one range",
        "HEADER_OVERLAP HEADER_HOLE",
        B,
        kit.entry(B, shape=header[A]["shape"], data_offsets=header[A]["data_offsets"]),
    )
    yield case("first tensor not at zero", "HEADER_HOLE", "byte 8", raw(json.dumps(moved), bytes(8) + data))
    yield case(
        "hole before the last", "HEADER_HOLE", LAST, raw(json.dumps(split), data[:begin] + bytes(16) + data[begin:])
    )
    yield case("a byte too many", "HEADER_TRAILING_BYTES", "1 bytes", raw(text, data + b"\0"))
    yield case("a mebibyte too many", "HEADER_TRAILING_BYTES", str(2**20), raw(text, data + bytes(2**20)))
    yield case("a byte too few", "DATA_TRUNCATED", str(len(data)), raw(text, data[:-1]))
    yield case("no data", "DATA_TRUNCATED", "has 0", raw(text, b""))
    yield case(
        "data begins off 8",
        "HEADER_UNALIGNED",
        "multiple of 8",
        raw(text + " " * ((1 - len(text)) % 8), data, align=False),
    )
    yield case(
        "a second file behind it", "HEADER_TRAILING_BYTES", "after the last", kit.good_weights + kit.good_weights
    )
    yield case(
        "nothing but metadata", "NO_TENSORS MISSING_MODULE", "no tensors", raw('{"__metadata__":{"format":"pt"}}'), "B1"
    )
    yield case("an empty object", "NO_TENSORS MISSING_MODULE", "no tensors", raw("{}"), "B1")


def _bombs(kit: Kit) -> Iterator[Case]:
    nothing = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'

    def case(name: str, code: str, offender: str, weights: bytes) -> Case:
        return kit.case("§5", f"bomb: {name}", code, offender, weights=weights)

    many = ",".join(f'"t{number}":{nothing}' for number in range(6000))
    yield case("6000 tensors of nothing", "HEADER_TOO_MANY_TENSORS", "4096", raw("{" + many + "}"))
    yield case("100 000 braces", "HEADER_TOO_MANY_TENSORS", "4096", raw("{" + '"a":{},' * 100_000 + '"b":{}}'))
    yield case("300 000 commas", "HEADER_TOO_MANY_TENSORS", "4096", raw('{"a":[' + "0," * 300_000 + "0]}"))
    yield case("header of 2 MiB", "HEADER_TOO_LARGE", str(2**21), raw("{" + " " * (2**21 - 2) + "}"))
    yield case("header of 8 MiB and a name", "HEADER_TOO_LARGE", "limit", raw('{"' + "a" * 2**23 + '":1}'))
    yield case("10 000 levels of lists", "HEADER_TOO_DEEP", "deeper", raw('{"a":' + "[" * 10_000 + "]" * 10_000 + "}"))
    yield case("4000 levels of objects", "HEADER_TOO_DEEP", "deeper", raw('{"a":' * 4000 + "1" + "}" * 4000))
    yield case("a name of a megabyte", "HEADER_NAME", "aaaaaaaa", raw('{"' + "a" * 1_000_000 + '":1}'))
    yield case("4000 escapes that grow", "HEADER_NAME", "not allowed", raw('{"' + "\\u0000" * 4000 + '":1}'))
