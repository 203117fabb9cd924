"""The numbers in the tensors: found in every dtype, wherever in a tensor and in a file they are."""

import io
from dataclasses import replace

import numpy as np
import pytest

from loraport.bundle.base import BaseModule
from loraport.bundle.digest import sha256_digest
from loraport.bundle.safetensors_header import TensorEntry
from loraport.bundle.tensor_values import TensorScan
from loraport.bundle.verdict import Limits
from loraport.bundle.verify import CHUNK_BYTES
from tests.bundle_files import (
    HIDDEN,
    Q0,
    Q1,
    V1,
    a_name,
    b_name,
    codes,
    config,
    small_base,
    tensors,
    verify,
    warned,
    weights,
)

ANY_NORM = Limits(max_update_norm=float("inf"))


def with_value(value: float, *, name: str = a_name(Q1), at: tuple[int, int] = (1, 5)) -> dict[str, np.ndarray]:
    values = tensors()
    values[name][at] = value
    return values


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
def test_a_value_that_is_not_finite_is_refused_by_tensor(dtype: str, value: float) -> None:
    verdict = verify(content=weights(with_value(value), dtype))
    assert codes(verdict) == {"NON_FINITE"}
    assert [found.subject for found in verdict.violations] == [a_name(Q1)]


@pytest.mark.parametrize("at", [(0, 0), (-1, -1)])
def test_the_last_tensor_and_its_corners_are_looked_at(at: tuple[int, int]) -> None:
    assert "NON_FINITE" in codes(verify(content=weights(with_value(np.nan, name=b_name(V1), at=at))))


def test_values_beyond_a_chunk_are_looked_at() -> None:
    """A tensor of a file that spans several reads."""
    wide = CHUNK_BYTES // 4 // 2 + 100
    base = replace(small_base(), modules=(BaseModule("model.layers.0.self_attn.q_proj", "linear", wide, 4),))
    settings = config(r=5, target_modules=["q_proj"])
    values = {a_name(Q0): np.ones((5, wide), np.float32), b_name(Q0): np.ones((4, 5), np.float32)}
    data = weights(values)
    good = verify(settings, io.BytesIO(data), base=base)  # type: ignore[arg-type]
    assert codes(good) == set()
    assert good.weights_digest == sha256_digest(data)
    values[a_name(Q0)][-1, -1] = np.inf
    assert codes(verify(settings, io.BytesIO(weights(values)), base=base)) == {"NON_FINITE"}  # type: ignore[arg-type]


def test_a_value_that_overflows_the_served_dtype() -> None:
    values = weights(with_value(70_000.0))
    assert codes(verify(content=values, limits=ANY_NORM)) == set()
    assert codes(verify(content=values, limits=replace(ANY_NORM, serving_dtype="BF16"))) == set()
    assert codes(verify(content=values, limits=Limits(serving_dtype="F16"))) == {
        "UPDATE_NORM",
        "VALUE_OVERFLOW",
    }
    almost = weights(with_value(65_519.0))
    assert codes(verify(content=almost, limits=replace(ANY_NORM, serving_dtype="F16"))) == set()
    largest = weights(with_value(3.4e38, name=b_name(Q0), at=(0, 0)))
    assert "VALUE_OVERFLOW" in codes(verify(content=largest, limits=Limits(serving_dtype="BF16")))


def test_an_update_that_can_overflow() -> None:
    assert codes(verify(content=weights(with_value(1e35)))) == {"UPDATE_OVERFLOW"}
    assert codes(verify(content=weights(with_value(1e20)), limits=ANY_NORM)) == set()
    assert codes(verify(content=weights(with_value(1e20)))) == {"UPDATE_NORM"}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("huge", ["A", "B"])
def test_a_huge_matrix_beside_a_zero_one_is_refused(dtype: str, huge: str) -> None:
    """Their product is zero, what the device computes is an infinity times zero."""
    values = {name: np.full_like(value, 1e38 if f"lora_{huge}" in name else 0) for name, value in tensors().items()}
    verdict = verify(content=weights(values, dtype))
    assert codes(verdict) == {"UPDATE_OVERFLOW"}
    tame = {name: np.minimum(value, 1e30) for name, value in values.items()}
    assert codes(verify(content=weights(tame, dtype))) == set()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_norm_of_an_update_has_a_limit(dtype: str) -> None:
    values = tensors()
    module = next(m for m in verify(content=weights(values, dtype)).modules if m.path == Q0)
    stored = {name: _as_stored(values[name], dtype) for name in (a_name(Q0), b_name(Q0))}
    norms = [float(np.linalg.norm(value.astype(np.float64))) for value in stored.values()]
    bound = module.scaling * norms[0] * norms[1]
    update = module.scaling * stored[b_name(Q0)].astype(np.float64) @ stored[a_name(Q0)].astype(np.float64)
    assert np.linalg.norm(update, 2) <= np.linalg.norm(update) <= bound * (1 + 1e-12), "no norm of it is larger"
    for limit, refused in ((bound * (1 + 1e-9), False), (bound * (1 - 1e-9), True)):
        verdict = verify(content=weights(values, dtype), limits=Limits(max_update_norm=limit))
        found = {violation.subject for violation in verdict.violations if violation.code == "UPDATE_NORM"}
        assert (Q0 in found) is refused


def test_the_norm_does_not_depend_on_how_the_file_is_cut() -> None:
    values = {name: np.full_like(value, 3.0) for name, value in tensors().items()}
    piece = memoryview(values[a_name(Q0)].tobytes())
    entry = TensorEntry(a_name(Q0), "F32", values[a_name(Q0)].shape, 0, len(piece))
    whole, cut = TensorScan(entry), TensorScan(entry)
    whole.add(piece)
    for start in range(0, len(piece), 12):
        cut.add(piece[start : start + 12])
    assert whole.squares == cut.squares == 9.0 * values[a_name(Q0)].size


def test_zero_b_is_admitted_with_a_warning() -> None:
    values = tensors()
    for name in values:
        if "lora_B" in name:
            values[name][:] = -0.0
    verdict = verify(content=weights(values))
    assert codes(verdict) == set()
    assert warned(verdict) == {"NO_EFFECT"}
    assert "every B" in verdict.warnings[0].detail


def test_one_zero_b_is_named() -> None:
    values = tensors()
    values[b_name(Q1)][:] = 0
    verdict = verify(content=weights(values))
    assert [(warning.code, warning.subject) for warning in verdict.warnings] == [("NO_EFFECT", Q1)]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_many_denormals_are_a_warning(dtype: str) -> None:
    values = tensors()
    values[a_name(Q0)] = np.full((2, HIDDEN), 1e-39 if dtype != "F16" else 1e-6, np.float32)
    verdict = verify(content=weights(values, dtype))
    assert codes(verdict) == set()
    assert warned(verdict) == {"DENORMALS"}


def test_zeros_are_not_denormals() -> None:
    values = tensors()
    values[a_name(Q0)][:] = 0
    assert warned(verify(content=weights(values))) == set()


class _Shrinking(io.BytesIO):
    """A file that says it is longer than what can be read."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size) if self.tell() < 800 else b""


def test_a_file_that_shrinks_while_it_is_read() -> None:
    verdict = verify(content=_Shrinking(weights()))  # type: ignore[arg-type]
    assert "DATA_TRUNCATED" in codes(verdict)
    assert verdict.weights_digest is None


def _as_stored(value: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the numbers that a file of this dtype holds."""
    if dtype == "F16":
        return value.astype(np.float16)
    if dtype == "BF16":
        return (value.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return value.astype(np.float32)
