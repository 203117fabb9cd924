"""A strict reader of safetensors headers.

The format's own library lets the last of two equal names win, skips unknown fields and allows
headers of 100 MB. Here a header is either read in the one way in which every reader must read it,
or refused with all its faults. Nothing larger than the header is allocated.

Layout of a file: 8 bytes little-endian N, N bytes of JSON, then the data. Offsets in the header
are half-open ranges [begin, end) from the first byte of the data.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraport.bundle.canonical import StrictJsonError, load_strict
from loraport.bundle.verdict import Limits, Violation

PREFIX_BYTES = 8
METADATA = "__metadata__"

# Bits per element of every dtype of the format.
DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
ADAPTER_DTYPES = frozenset({"F32", "F16", "BF16"})

_NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its bytes are [begin, end) of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header without faults. `tensors` is in the order of the data; `data_start` is a file offset in bytes."""

    tensors: tuple[TensorEntry, ...]
    data_start: int


def header_length(prefix: bytes, *, file_size: int, limits: Limits) -> int | Violation:
    """Returns N, the number of header bytes after the first 8, or why they must not be read."""
    if len(prefix) < PREFIX_BYTES or file_size < PREFIX_BYTES + 2:
        return Violation("HEADER_LENGTH", f"a file of {file_size} bytes is too short for a header")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length < 2 or length > file_size - PREFIX_BYTES:
        return Violation("HEADER_LENGTH", f"the header is said to have {length} bytes, the file has {file_size}")
    if length > limits.max_header_bytes:
        return Violation("HEADER_TOO_LARGE", f"{length} bytes of header, the limit is {limits.max_header_bytes}")
    return length


def parse_header(
    raw: bytes,
    *,
    file_size: int,
    limits: Limits,
    dtypes: frozenset[str] = ADAPTER_DTYPES,
    require_alignment: bool = True,
) -> tuple[Header | None, tuple[Violation, ...]]:
    """Reads the N header bytes of a file of `file_size` bytes.

    `dtypes` are those that the file may have. With `require_alignment` the data must begin at a
    multiple of 8, so that every reader can use it in place.

    Returns the header and no violation, or no header and all violations that could be found.
    """
    data_start = PREFIX_BYTES + len(raw)
    entries, violations = _load(raw, limits)
    if entries is None:
        return None, tuple(violations)
    if require_alignment and data_start % 8:
        detail = f"the data begins at byte {data_start}, no multiple of 8; save the file again with safetensors"
        violations.append(Violation("HEADER_UNALIGNED", detail))
    tensors: list[TensorEntry] = []
    for name, entry in entries.items():
        found = _parse_entry(name, entry, limits, dtypes)
        if isinstance(found, TensorEntry):
            tensors.append(found)
        else:
            violations.append(found)
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    if len(tensors) == len(entries):
        violations.extend(_check_layout(tensors, file_size - data_start))
    if violations:
        return None, tuple(violations)
    return Header(tuple(tensors), data_start), ()


def _load(raw: bytes, limits: Limits) -> tuple[dict[str, Any] | None, list[Violation]]:
    if not raw.startswith(b"{"):
        return None, [Violation("HEADER_NOT_JSON", "the header does not begin with {")]
    # Every tensor takes one brace and at most six commas, so a bomb shows before it is parsed.
    metadata_slack = limits.max_metadata_bytes
    if raw.count(b"{") > limits.max_tensors + 2 or raw.count(b",") > 8 * limits.max_tensors + metadata_slack:
        return None, [Violation("HEADER_TOO_MANY_TENSORS", f"more than {limits.max_tensors} tensors")]
    text = raw.rstrip(b" ")
    if not text.endswith(b"}"):
        return None, [Violation("HEADER_NOT_JSON", "the header does not end with } and spaces")]
    try:
        value = load_strict(text, max_bytes=limits.max_header_bytes, max_depth=3, wide_integers=True)
    except StrictJsonError as error:
        return None, [_json_violation(error)]
    if not isinstance(value, dict):
        return None, [Violation("HEADER_NOT_JSON", "the header is not an object")]
    violations = []
    if METADATA in value and not _is_small_metadata(value.pop(METADATA), limits):
        detail = f"must be at most {limits.max_metadata_pairs} pairs of text in {limits.max_metadata_bytes} bytes"
        violations.append(Violation("HEADER_METADATA", f"{METADATA} {detail}", METADATA))
    if len(value) > limits.max_tensors:
        violations.append(Violation("HEADER_TOO_MANY_TENSORS", f"{len(value)}, the limit is {limits.max_tensors}"))
        return None, violations
    return value, violations


def _json_violation(error: StrictJsonError) -> Violation:
    # Tensor names have dots; the fixed keys of an entry and the usual keys of the metadata have none.
    if error.code == "DUPLICATE_KEY" and "." in error.subject:
        return Violation("DUPLICATE_TENSOR", f"the tensor {error.subject:.300} is listed twice", error.subject[:300])
    return Violation(f"HEADER_{error.code}", error.detail, error.subject[:300])


def _is_small_metadata(value: Any, limits: Limits) -> bool:
    if not isinstance(value, dict) or len(value) > limits.max_metadata_pairs:
        return False
    if not all(isinstance(item, str) for item in value.values()):
        return False
    return sum(len(key.encode()) + len(item.encode()) for key, item in value.items()) <= limits.max_metadata_bytes


def _parse_entry(name: str, entry: Any, limits: Limits, dtypes: frozenset[str]) -> TensorEntry | Violation:
    subject = name[:300]
    if len(name) > limits.max_name_length or not _NAME.fullmatch(name):
        return Violation("HEADER_NAME", f"the name {subject!r} is not allowed", subject)
    if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
        return Violation("HEADER_ENTRY", f"{name} must have exactly dtype, shape and data_offsets", subject)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_integers(shape) or not _are_integers(offsets) or len(offsets) != 2:
        return Violation("HEADER_ENTRY", f"dtype, shape or data_offsets of {name} has the wrong type", subject)
    if dtype not in DTYPE_BITS:
        return Violation("UNKNOWN_DTYPE", f"{name} has dtype {dtype!r:.40}", subject)
    if dtype not in dtypes:
        return Violation("UNSUPPORTED_DTYPE", f"{name} has dtype {dtype}", subject)
    if len(shape) > 8 or any(not 1 <= dimension <= limits.max_dimension for dimension in shape):
        return Violation("HEADER_SHAPE", f"{name} has shape {shape!s:.80}", subject)
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if begin < 0 or end < begin or bits % 8 or end - begin != bits // 8:
        detail = f"{name}: bytes [{begin}, {end}) do not hold shape {shape} of {dtype}"
        return Violation("HEADER_OFFSETS", detail, subject)
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _are_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_layout(tensors: list[TensorEntry], data_size: int) -> list[Violation]:
    """Checks that the tensors, in order, cover the data exactly once."""
    violations: list[Violation] = []
    position = 0
    for tensor in tensors:
        where = f"{tensor.name} begins at byte {tensor.begin}, the one before it ends at {position}"
        if tensor.begin < position:
            violations.append(Violation("HEADER_OVERLAP", where, tensor.name))
        elif tensor.begin > position:
            violations.append(Violation("HEADER_HOLE", where, tensor.name))
        position = max(position, tensor.end)
    if position > data_size:
        detail = f"the tensors need {position} bytes of data, the file has {data_size}"
        violations.append(Violation("DATA_TRUNCATED", detail))
    elif position < data_size:
        detail = f"{data_size - position} bytes after the last tensor"
        violations.append(Violation("HEADER_TRAILING_BYTES", detail))
    return violations
