"""The safetensors header: every legal trick that another reader would see differently is refused."""

import io
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from loraport.bundle.verdict import Limits
from tests.bundle_files import a_name, codes, config, encode, entries, pack, small_base, tensors, verify, weights

A, B = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", a_name("model.layers.1.self_attn.v_proj")
HEADER, DATA = entries(tensors())
END = len(DATA)


def with_entry(name: str = A, **changes: Any) -> dict[str, Any]:
    return {**HEADER, name: {**HEADER[name], **changes}}


def one(value: Any, data: bytes = b"") -> bytes:
    return pack({"a.lora_A.weight": value}, data)


BEGIN = HEADER[B]["data_offsets"][0]
SHIFTED = {
    name: entry if name == "__metadata__" else {**entry, "data_offsets": [o + 8 for o in entry["data_offsets"]]}
    for name, entry in HEADER.items()
}
TEXT = json.dumps(HEADER)

CASES: list[tuple[str, bytes, str]] = [
    ("empty file", b"", "EMPTY_FILE"),
    ("seven bytes", bytes(7), "HEADER_LENGTH"),
    ("only a length", struct.pack("<Q", 2), "HEADER_LENGTH"),
    ("length 0", pack(HEADER, DATA, length=0), "HEADER_LENGTH"),
    ("length 1", pack(HEADER, DATA, length=1), "HEADER_LENGTH"),
    ("length 2^63", pack(HEADER, DATA, length=1 << 63), "HEADER_LENGTH"),
    ("length 2^64-1", pack(HEADER, DATA, length=(1 << 64) - 1), "HEADER_LENGTH"),
    ("length past the end", pack(HEADER, b"", length=len(TEXT) + 100), "HEADER_LENGTH"),
    ("header of 2 MiB", pack(b"{" + b" " * 2**21 + b"}"), "HEADER_TOO_LARGE"),
    ("zeros", bytes(4096), "HEADER_LENGTH"),
    ("a zip", b"PK\x03\x04" + bytes(100), "HEADER_LENGTH"),
    ("not JSON", pack(b"{" + b"x" * 62 + b"}"), "HEADER_NOT_JSON"),
    ("an array", pack(b"[]"), "HEADER_NOT_JSON"),
    ("leading space", pack(b" " + TEXT.encode(), DATA), "HEADER_NOT_JSON"),
    ("trailing newline", pack(TEXT.encode() + b"\n", DATA), "HEADER_NOT_JSON"),
    ("trailing zero byte", pack(TEXT.encode() + b"\0", DATA), "HEADER_NOT_JSON"),
    ("two documents", pack(b"{}{}"), "HEADER_NOT_JSON"),
    ("bad UTF-8", pack(b'{"\xff":1}'), "HEADER_NOT_UTF8"),
    ("lone surrogate", pack(b'{"\\ud800":1}'), "HEADER_LONE_SURROGATE"),
    ("NaN", pack(b'{"a":NaN}'), "HEADER_NON_FINITE_NUMBER"),
    ("float offset", pack(b'{"a":1.5}'), "HEADER_FLOAT_NOT_ALLOWED"),
    ("huge integer", pack(b'{"a":' + b"9" * 400 + b"}"), "HEADER_NUMBER_RANGE"),
    ("depth 10000", pack(b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"), "HEADER_TOO_DEEP"),
    ("depth 4", pack(b'{"a":{"b":[[1]]}}'), "HEADER_TOO_DEEP"),
    ("same tensor twice", pack((TEXT[:-1] + f', "{A}": {json.dumps(HEADER[A])}}}').encode(), DATA), "DUPLICATE_TENSOR"),
    ("same field twice", pack(b'{"a.b":{"dtype":"F32","dtype":"F16"}}'), "HEADER_DUPLICATE_KEY"),
    ("metadata twice", pack(b'{"__metadata__":{},"__metadata__":{}}'), "HEADER_DUPLICATE_KEY"),
    ("metadata key twice", pack(b'{"__metadata__":{"a":"","a":""}}'), "HEADER_DUPLICATE_KEY"),
    ("metadata null", pack({**HEADER, "__metadata__": None}, DATA), "HEADER_METADATA"),
    ("metadata number", pack({**HEADER, "__metadata__": {"a": 1}}, DATA), "HEADER_METADATA"),
    ("metadata of 33 pairs", pack({**HEADER, "__metadata__": {str(i): "" for i in range(33)}}, DATA), "HEADER_METADATA"),
    ("metadata of 9 KiB", pack({**HEADER, "__metadata__": {"a": "b" * 9000}}, DATA), "HEADER_METADATA"),
    ("entry is no object", one(1), "HEADER_ENTRY"),
    ("entry lacks a key", one({"dtype": "F32", "shape": []}), "HEADER_ENTRY"),
    ("unknown field", pack(with_entry(extra=1), DATA), "HEADER_ENTRY"),
    ("dtype is a number", pack(with_entry(dtype=1), DATA), "HEADER_ENTRY"),
    ("shape is text", pack(with_entry(shape="2"), DATA), "HEADER_ENTRY"),
    ("bool in the shape", pack(with_entry(shape=[True, 16]), DATA), "HEADER_ENTRY"),
    ("three offsets", pack(with_entry(data_offsets=[0, 64, 128]), DATA), "HEADER_ENTRY"),
    ("unknown dtype", pack(with_entry(dtype="F33"), DATA), "UNKNOWN_DTYPE"),
    ("lower-case dtype", pack(with_entry(dtype="f32"), DATA), "UNKNOWN_DTYPE"),
    *((f"dtype {d}", pack(with_entry(dtype=d), DATA), "UNSUPPORTED_DTYPE") for d in ("F64", "I32", "BOOL", "F8_E4M3", "F4")),
    ("zero dimension", pack(with_entry(shape=[0, 16], data_offsets=[0, 0]), DATA), "HEADER_SHAPE"),
    ("negative dimension", pack(with_entry(shape=[-2, -16]), DATA), "HEADER_SHAPE"),
    ("dimension 2^64-1", pack(with_entry(shape=[0, 2**64 - 1], data_offsets=[0, 0]), DATA), "HEADER_SHAPE"),
    ("nine dimensions", pack(with_entry(shape=[1] * 9), DATA), "HEADER_SHAPE"),
    ("product overflows", pack(with_entry(shape=[2**20] * 4), DATA), "HEADER_OFFSETS"),
    ("begin after end", pack(with_entry(data_offsets=[128, 0]), DATA), "HEADER_OFFSETS"),
    ("negative offsets", pack(with_entry(data_offsets=[-128, 0]), DATA), "HEADER_OFFSETS"),
    ("wrong span", pack(with_entry(shape=[2, 15]), DATA), "HEADER_OFFSETS"),
    ("overlap", pack(with_entry(B, data_offsets=[BEGIN - 4, BEGIN + 124]), DATA), "HEADER_OVERLAP"),
    ("same range twice", pack(with_entry(B, data_offsets=[0, 128]), DATA), "HEADER_OVERLAP"),
    ("first offset 8", pack(SHIFTED, bytes(8) + DATA), "HEADER_HOLE"),
    ("trailing bytes", pack(HEADER, DATA + bytes(8)), "HEADER_TRAILING_BYTES"),
    ("a zip at the end", pack(HEADER, DATA + b"PK\x05\x06" + bytes(18)), "HEADER_TRAILING_BYTES"),
    ("cut data", pack(HEADER, DATA[:-4]), "DATA_TRUNCATED"),
    ("unaligned", pack(HEADER, DATA, align=False) if len(TEXT) % 8 else b"", "HEADER_UNALIGNED"),
    ("no tensors", pack(b"{}"), "NO_TENSORS"),
    ("too many braces", pack(b"{" + b'"a":{},' * 5000 + b'"b":{}}'), "HEADER_TOO_MANY_TENSORS"),
    ("too many commas", pack(b'{"a":[' + b"0," * 100_000 + b"0]}"), "HEADER_TOO_MANY_TENSORS"),
    *(
        (f"name {name[:12]!r}", pack({**HEADER, name: HEADER[A]}, DATA), "HEADER_NAME")
        for name in ("", "../../x", "a\0b", "a..b", ".a", "a.", "a b", "é", "x" * 257, "a/b")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "code"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_refused(content: bytes, code: str) -> None:
    assert code in codes(verify(content=content))


@pytest.mark.parametrize("content", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_a_file_is_judged_like_bytes(content: bytes) -> None:
    from_bytes, from_file = verify(content=content), verify(content=io.BytesIO(content))  # type: ignore[arg-type]
    assert from_bytes == from_file


def test_padding_with_spaces_is_legal() -> None:
    assert codes(verify(content=pack(json.dumps(HEADER).encode() + b" " * 64, DATA))) == set()


def test_a_file_over_the_limit_is_not_read() -> None:
    verdict = verify(limits=Limits(max_file_bytes=100))
    assert codes(verdict) == {"FILE_TOO_LARGE"}
    assert verdict.weights_digest is None


def test_all_faults_of_a_header_are_listed() -> None:
    header = {**HEADER, A: {**HEADER[A], "dtype": "F33"}, "__metadata__": None, B: {**HEADER[B], "shape": [0]}}
    assert {"UNKNOWN_DTYPE", "HEADER_METADATA", "HEADER_SHAPE"} <= codes(verify(content=pack(header, DATA)))


def test_the_order_of_the_entries_does_not_matter() -> None:
    backwards = dict(reversed(HEADER.items()))
    assert codes(verify(content=pack(backwards, DATA))) == set()


def test_more_tensors_than_allowed() -> None:
    assert "HEADER_TOO_MANY_TENSORS" in codes(verify(limits=Limits(max_tensors=7)))


def test_the_list_of_violations_is_bounded() -> None:
    values = {f"x{i}.lora_A.weight": np.ones((1, 1), np.float32) for i in range(50)}
    verdict = verify(content=weights(values), limits=Limits(max_listed=10))
    assert len(verdict.violations) == 11
    assert verdict.violations[-1].code == "MORE_VIOLATIONS"
    assert verdict.weights_digest is not None


def test_memory_stays_bounded() -> None:
    bombs = [
        pack(b"{" + b'"a":{},' * 140_000 + b'"b":{}}'),
        pack(b'{"a":[' + b"0," * 500_000 + b"0]}"),
        pack(b'{"' + b"a" * 1_000_000 + b'":1}'),
        pack(b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    ]
    base, settings = small_base(), encode(config())
    for bomb in bombs:
        tracemalloc.start()
        verify(settings, bomb, base=base)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * len(bomb)
