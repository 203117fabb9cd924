"""Triton's interpreter with many units of a kernel at once: one lane each, as a leading dimension of every value.

The interpreter takes a unit's operations one by one, and most of its time is Python. Here the same text goes through the
same front end (types, promotion, broadcasting), and only what is below it differs: each value has all lanes, and numpy
computes them together. The kernels' walk over units is replaced by groups of units whose loops are equally long; so
what one unit leaves for another, and the walk itself, are for the ordinary interpreter to try.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not tested here")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter as interpreted  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle  # noqa: E402

_AT_ONCE = 1 << 20  # numbers of the largest value that is computed at once: more take memory, fewer time


class LaneBuilder(InterpreterBuilder):
    """Every value has the shape [lanes or 1, *block]: a scalar is [lanes or 1], as the interpreter's is [1]."""

    def __init__(self) -> None:
        super().__init__()
        self.options = interpreted.interpreter_builder.options
        self.set_grid_dim(1, 1, 1)
        self.set_grid_idx(0, 0, 0)

    def create_make_range(self, ret_ty: Any, start: int, stop: int) -> TensorHandle:
        return TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_expand_dims(self, arg: TensorHandle, axis: int) -> TensorHandle:
        return TensorHandle(np.expand_dims(arg.data, axis + 1), arg.dtype.scalar)

    def create_broadcast(self, arg: TensorHandle, shape: Sequence[int]) -> TensorHandle:
        return TensorHandle(np.broadcast_to(arg.data, (arg.data.shape[0], *shape)), arg.dtype.scalar)

    def create_splat(self, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
        data = arg.data.reshape(-1, *[1] * len(ret_ty.shape))
        return TensorHandle(np.broadcast_to(data, (len(data), *ret_ty.shape)), arg.dtype.scalar)

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *_: object
    ) -> TensorHandle:
        dtype = interpreted._get_np_dtype(ptrs.get_element_ty())
        shape = np.broadcast_shapes(ptrs.data.shape, mask.data.shape)
        found = np.zeros(shape, dtype)
        if other is not None:
            found[...] = other.data
        wanted = np.flatnonzero(np.broadcast_to(mask.data, shape))
        places = np.broadcast_to(ptrs.data, shape).reshape(-1)[wanted]
        nothing = np.zeros(len(wanted), dtype)
        found.reshape(-1)[wanted] = interpreted._interpreter.load(places, np.ones(len(wanted), bool), nothing, dtype)
        return TensorHandle(found, ptrs.get_element_ty())

    def create_masked_store(self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *_: object) -> None:
        data = np.broadcast_arrays(ptrs.data, value.data, mask.data)
        interpreted._interpreter.store(*(np.ascontiguousarray(part) for part in data))


def _sum(self: ReduceOps, value: tl.tensor) -> tl.tensor:
    data = value.handle.data.sum(axis=self.axis + 1)
    shape = list(data.shape[1:])
    kind = tl.block_type(value.dtype, shape) if shape else value.dtype
    return tl.tensor(TensorHandle(data, value.dtype), kind)


class Lanes:
    """Stands in a kernel's module where `range` does, for launches of one program."""

    def __init__(self) -> None:
        self._launches: list[list[np.ndarray]] = []

    def plan(self, loops: Sequence[int], *, per: int, numbers: int) -> None:
        """Group the units of a launch to come. `loops[i]` is how often a unit of record i goes round, `per` how many
        units a record has, `numbers` how many numbers a unit's largest value has."""
        at_once = max(1, _AT_ONCE // numbers)
        of_unit = np.repeat(np.asarray(loops, dtype=np.int64), per)
        groups: list[np.ndarray] = []
        for count in np.unique(of_unit):
            same = np.flatnonzero(of_unit == count).astype(np.int32)
            groups += np.split(same, range(at_once, len(same), at_once))
        self._launches.append(groups)

    def __call__(self, first: Any, last: Any, step: Any) -> Iterator[Any]:
        if isinstance(first, tl.tensor):
            groups = self._launches.pop(0)
            assert sum(map(len, groups)) == int(last), "the units that there are"
            yield from (tl.tensor(TensorHandle(group, tl.int32), tl.int32) for group in groups)
            return
        ends = last.handle.data if isinstance(last, tl.tensor) else np.array([last])
        (rounds,) = set((-(-(ends - first) // step)).tolist())
        yield from range(first, first + rounds * step, step)


@contextmanager
def in_lanes(*modules: ModuleType) -> Iterator[Lanes]:
    """Interpret the kernels of `modules` in lanes."""
    lanes = Lanes()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(interpreted.interpreter_semantic, "builder", LaneBuilder()))
        stack.enter_context(mock.patch.object(ReduceOps, "sum", _sum))
        for module in modules:
            stack.enter_context(mock.patch.object(module, "range", lanes, create=True))
        yield lanes
