"""What the numbers of a tensor are: finite, large, denormal or all zero, by their bit patterns; and its norm.

Sign cleared, the bits of an IEEE float taken as an integer rise with its magnitude, so one maximum
answers for overflow, infinity and NaN, and a comparison counts the denormals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraport.bundle.safetensors_header import TensorEntry
from loraport.bundle.verdict import Limits, ModuleEntry, Violation

# No entry of A, B or scaling * B @ A may reach this. Honest ones are below 2^10; the sums of a forward pass
# over a million terms stay within float32. A and B count by themselves: A @ x comes before B, so a huge A
# beside a zero B is an infinity times zero.
MAX_UPDATE = 2.0**100


@dataclass(frozen=True, slots=True)
class _Layout:
    """The bit patterns of a dtype with the sign cleared; they are compared as unsigned integers."""

    integer: type[np.unsignedinteger]
    magnitude: int
    infinity: int
    least_normal: int


_LAYOUTS = {
    "F32": _Layout(np.uint32, 0x7FFFFFFF, 0x7F800000, 0x00800000),
    "F16": _Layout(np.uint16, 0x7FFF, 0x7C00, 0x0400),
    "BF16": _Layout(np.uint16, 0x7FFF, 0x7F80, 0x0080),
}
# The least magnitude that rounds to infinity: half a step above the largest finite number.
_OVERFLOW = {"F16": 65520.0, "BF16": float.fromhex("0x1.ffp+127"), "F32": float("inf")}


class TensorScan:
    """Accumulates what `judge_values` needs to know of one tensor, piece by piece.

    A piece is a whole number of elements; pieces come in order.
    """

    __slots__ = ("_layout", "count", "denormals", "non_finite", "peak_bits", "squares", "tensor")

    def __init__(self, tensor: TensorEntry) -> None:
        self.tensor = tensor
        self._layout = _LAYOUTS[tensor.dtype]
        self.count = 0
        self.denormals = 0
        self.non_finite = 0
        self.peak_bits = 0
        self.squares = 0.0

    def add(self, piece: memoryview) -> None:
        """Looks at the next elements."""
        layout = self._layout
        whole = len(piece) - len(piece) % np.dtype(layout.integer).itemsize
        bits = np.frombuffer(piece[:whole], dtype=layout.integer) & layout.integer(layout.magnitude)
        if not bits.size:
            return
        self.count += bits.size
        peak = int(bits.max())
        self.peak_bits = max(self.peak_bits, peak)
        if peak >= layout.infinity:
            self.non_finite += int(np.count_nonzero(bits >= layout.integer(layout.infinity)))
        else:
            numbers = _magnitudes(bits, self.tensor.dtype).astype(np.float64)
            self.squares += float(numbers @ numbers)
        small = int(np.count_nonzero(bits < layout.integer(layout.least_normal)))
        if small:
            self.denormals += small - (bits.size - int(np.count_nonzero(bits)))

    @property
    def norm(self) -> float:
        """The Frobenius norm, not less than the true one but for rounding; of a finite tensor only."""
        return math.sqrt(self.squares)

    @property
    def peak(self) -> float:
        """The largest magnitude, as a number; infinity when the tensor is not finite."""
        if self.peak_bits >= self._layout.infinity:
            return float("inf")
        bits = np.array([self.peak_bits], dtype=self._layout.integer)
        return float(_magnitudes(bits, self.tensor.dtype)[0])


def _magnitudes(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the numbers that have these bit patterns."""
    if dtype == "F16":
        return bits.view(np.float16)
    wide = bits.astype(np.uint32) << np.uint32(16) if dtype == "BF16" else bits
    return wide.view(np.float32)


def judge_values(
    scans: Sequence[TensorScan], modules: Sequence[ModuleEntry], limits: Limits
) -> tuple[list[Violation], list[Violation]]:
    """Returns violations and warnings about the values of all tensors."""
    violations = []
    for scan in scans:
        name = scan.tensor.name
        if scan.non_finite:
            detail = f"{name} holds NaN or infinity in {scan.non_finite} of {scan.count} places"
            violations.append(Violation("NON_FINITE", detail, name))
        elif limits.serving_dtype is not None and scan.peak >= _OVERFLOW[limits.serving_dtype]:
            detail = f"{name} holds {scan.peak:.6g}, which is infinite in {limits.serving_dtype}"
            violations.append(Violation("VALUE_OVERFLOW", detail, name))
    by_name = {scan.tensor.name: scan for scan in scans}
    for module in modules:
        a, b = by_name[module.a_name], by_name[module.b_name]
        bound = max(module.scaling * module.rank * a.peak * b.peak, a.peak, b.peak)
        if a.non_finite or b.non_finite:
            continue
        norm = module.scaling * a.norm * b.norm
        if bound > MAX_UPDATE:
            detail = f"{module.path}: an entry of A, B or scaling * B @ A may be as large as {bound:.3g}"
            violations.append(Violation("UPDATE_OVERFLOW", detail, module.path))
        elif norm > limits.max_update_norm:
            detail = f"{module.path}: scaling * |A| * |B| is {norm:.4g}, the limit is {limits.max_update_norm:.6g}"
            violations.append(Violation("UPDATE_NORM", detail, module.path))
    return violations, [*_no_effect(by_name, modules), *_denormals(scans, limits)]


def _no_effect(by_name: dict[str, TensorScan], modules: Sequence[ModuleEntry]) -> list[Violation]:
    idle = [module.path for module in modules if by_name[module.b_name].peak_bits == 0]
    if not idle:
        return []
    if len(idle) == len(modules):
        return [Violation("NO_EFFECT", "every B is zero: the answers will be those of the base")]
    return [Violation("NO_EFFECT", f"B is zero in {len(idle)} of {len(modules)} modules, first {idle[0]}", idle[0])]


def _denormals(scans: Sequence[TensorScan], limits: Limits) -> list[Violation]:
    total, small = sum(scan.count for scan in scans), sum(scan.denormals for scan in scans)
    if small <= limits.max_denormal_share * total:
        return []
    return [Violation("DENORMALS", f"{small} of {total} values are denormal, which slows a CPU many-fold")]
