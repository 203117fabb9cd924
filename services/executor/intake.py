"""The last check of sealed bytes, in the process that will use them: digest, header, names, shapes.

The loader has verified these bytes and the registry's signed record says what they must be. Nothing here relies on the
loader having done so: the bytes are hashed again where they lie, the header is read by the one strict parser, and
the tensors must be exactly those of the signed module table.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraport.bundle.base import ModuleKind
from loraport.bundle.digest import sha256_digest
from loraport.bundle.identity import tensor_names
from loraport.bundle.safetensors_header import PREFIX_BYTES, Header, TensorEntry, header_length, parse_header
from loraport.bundle.verdict import DEFAULT_LIMITS, Limits, Violation
from services.executor.request import RefusalReason, Refused


@dataclass(frozen=True, slots=True)
class SignedModule:
    """A row of the signed module table: A is (rank, in_features), B is (out_features, rank)."""

    path: str
    rank: int
    scaling: float
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A matrix in the host-master bytes. `data` is C-order, little-endian, of "F32", "F16" or "BF16"."""

    dtype: str
    shape: tuple[int, int]
    data: memoryview


@dataclass(frozen=True, slots=True)
class HostModule:
    """One adapted linear: out += scaling * B @ A @ in; or an embedding, whose A has a column per token."""

    rank: int
    scaling: float
    a: HostTensor
    b: HostTensor
    kind: ModuleKind = "linear"


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """A revision's arrays as they came. Nobody writes to them after intake."""

    revision_id: str
    modules: Mapping[str, HostModule]
    size_bytes: int

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules.values())


def take_in(
    data: bytearray | memoryview,
    *,
    revision_id: str,
    weights_digest: str,
    weights_size: int,
    modules: Sequence[SignedModule],
    limits: Limits = DEFAULT_LIMITS,
) -> HostAdapter:
    """Check `data`, the whole weights file, and return views of its matrices. Copies nothing.

    Raises:
        Refused: BYTES_DIGEST_MISMATCH (other bytes than were signed), BYTES_MALFORMED (a header or a tensor that does
            not fit the signed module table; the detail names the first faults).
    """
    view = memoryview(data)
    if view.nbytes != weights_size:
        detail = f"{view.nbytes} bytes came, the record says {weights_size}"
        raise Refused(RefusalReason.BYTES_DIGEST_MISMATCH, detail)
    if not hmac.compare_digest(sha256_digest(view), weights_digest):
        raise Refused(RefusalReason.BYTES_DIGEST_MISMATCH, "the bytes do not have the digest of the record")
    header = _read_header(view, limits)
    entries = {entry.name: entry for entry in header.tensors}
    payload = view[header.data_start :]
    found = {module.path: _take_module(module, entries, payload) for module in modules}
    if entries or not found:
        extra = ", ".join(sorted(entries)[:5]) or "the module table is empty"
        raise Refused(RefusalReason.BYTES_MALFORMED, f"tensors outside the signed module table: {extra}")
    return HostAdapter(revision_id, found, weights_size)


def _read_header(view: memoryview, limits: Limits) -> Header:
    length = header_length(bytes(view[:PREFIX_BYTES]), file_size=view.nbytes, limits=limits)
    if isinstance(length, Violation):
        raise Refused(RefusalReason.BYTES_MALFORMED, f"{length.code}: {length.detail}")
    raw = bytes(view[PREFIX_BYTES : PREFIX_BYTES + length])
    header, violations = parse_header(raw, file_size=view.nbytes, limits=limits)
    if header is None:
        first = "; ".join(f"{v.code}: {v.detail}" for v in violations[:3])
        raise Refused(RefusalReason.BYTES_MALFORMED, first)
    return header


def _take_module(module: SignedModule, entries: dict[str, TensorEntry], payload: memoryview) -> HostModule:
    # The table has shapes, the names say which kind of module has them; staging compares that with the model.
    kind: ModuleKind = "embedding" if tensor_names(module.path, "embedding")[0] in entries else "linear"
    a_name, b_name = tensor_names(module.path, kind)
    a = _take_tensor(a_name, (module.rank, module.in_features), entries, payload)
    b = _take_tensor(b_name, (module.out_features, module.rank), entries, payload)
    return HostModule(module.rank, module.scaling, a, b, kind)


def _take_tensor(name: str, shape: tuple[int, int], entries: dict[str, TensorEntry], payload: memoryview) -> HostTensor:
    entry = entries.pop(name, None)
    if entry is None or entry.shape != shape:
        found = "missing" if entry is None else f"of shape {entry.shape}"
        raise Refused(RefusalReason.BYTES_MALFORMED, f"{name} is {found}, the record says {shape}")
    return HostTensor(entry.dtype, shape, payload[entry.begin : entry.end])
