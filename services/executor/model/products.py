"""The base's matrix products on a CPU: what they are computed in, and the layout in which the weights lie.

Why float32 where the checkpoint is bfloat16: a CPU without a bfloat16 dot product emulates one, and is several times
slower at it than in float32. A bfloat16 number is a float32 number, so the products of the upcast weights are those of
the bfloat16 model with nothing rounded in between. It costs the memory of float32 weights. See docs/adr/0014.

Why packed: at few rows most of a product's time is spent rearranging the weights for the vector or matrix units. oneDNN
lets that be done once.

With a compiled step and float32 products, weights that are bfloat16 numbers are kept as such too: up to four rows are
multiplied with those, which are half the bytes, and nothing is rounded that is not rounded otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional

from services.executor.kernels.cpu_step import THIN_ROWS, CpuStep
from services.executor.kernels.threads import on_one_thread

Products = Literal["auto", "native", "float32"]

# Multiply-adds below which a packed float32 product is left to one thread: 1 x 576 x 576 takes 96 µs on one and 130 on
# two, 1 x 576 x 960 150 on either. By the matrix unit 62 and 47, 92 and 60.
_SHARED = 500_000
# Rows for which oneDNN chooses the layout. From 32 on it is the same one, and it is the fastest for fewer rows too.
_ROWS_HINT = 32
# Up to so many rows there is a kernel for each number of them.
_EXACT_ROWS = 64
# What two ways to the same product may differ by: a few of the last bits.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def full_rows(rows: int) -> int:
    """Return how many rows a step of so many is filled up to: oneDNN makes a kernel for every number of rows.

    It keeps a thousand of them. Steps of SmolLM2's decoder of 160 rows on average, no two alike, took 40 ms for their
    products, 27 of it for arithmetic.
    """
    return rows if rows <= _EXACT_ROWS else -(-rows // _ROWS_HINT) * _ROWS_HINT


def has_bfloat16_products() -> bool:
    """Return whether the CPU multiplies bfloat16 numbers in hardware."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("amx_bf16", "amx_tile", "avx512_bf16", "bf16", "sve_bf16"))


def product_dtype(dtype: torch.dtype, choice: Products) -> torch.dtype:
    """Return what a model of `dtype` is computed in on this CPU: `dtype` itself or float32."""
    if choice == "float32" or (choice == "auto" and not has_bfloat16_products()):
        return torch.float32
    return dtype


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has packed products of a dtype, and they give what plain ones give."""
    if dtype is not torch.float32 and not (dtype is torch.bfloat16 and has_bfloat16_products()):
        return False
    try:
        x, weight, bias = (torch.rand(shape).to(dtype) for shape in ((3, 40), (24, 40), (24,)))
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        added = torch.ops.mkldnn._linear_pointwise.binary(x, product, packed, bias, "add")
        plain = functional.linear(x, weight, bias)
        same = torch.allclose(product, plain, rtol=_ROUNDING[dtype])
        same &= torch.allclose(added, product + plain, rtol=_ROUNDING[dtype])
        return same and torch.equal(packed.to_dense(), weight)
    except (AttributeError, RuntimeError):
        return False


class Linear:
    """x @ weight.T + bias for one matrix [out, in], packed where that is faster. Owned by one thread."""

    __slots__ = ("_bias", "_packed", "_plain", "_size", "_step", "_thin")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, step: CpuStep | None = None) -> None:
        self._bias = bias
        self._step = step
        self._thin: torch.Tensor | None = None
        self._size = weight.numel()
        self._plain: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None
        self._pack()

    def _pack(self) -> None:
        plain = self._plain
        if plain is None:
            return
        if self._step is not None and plain.dtype is torch.float32:
            half = plain.bfloat16()
            self._thin = half if torch.equal(half.float(), plain) else None
        if plain.device.type == "cpu" and _can_pack(plain.dtype):
            self._packed, self._plain = torch.ops.mkldnn._reorder_linear_weight(plain, _ROWS_HINT), None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. x [rows, in]; returns [rows, out]."""
        if self._packed is None:
            assert self._plain is not None
            return functional.linear(x, self._plain, self._bias)
        if self._thin is not None and x.shape[0] <= THIN_ROWS:
            assert self._step is not None
            return self._step.thin(x, self._thin, self._bias, None)
        product = torch.ops.mkldnn._linear_pointwise
        out: torch.Tensor = self._run(x, product, x, self._packed, self._bias, "none", [], "")
        return out

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return total + product; `total` [rows, out] is not written to."""
        if self._packed is None:
            return total + self(x)
        if self._thin is not None and x.shape[0] <= THIN_ROWS:
            assert self._step is not None
            return self._step.thin(x, self._thin, self._bias, total)
        add = torch.ops.mkldnn._linear_pointwise.binary
        out: torch.Tensor = self._run(x, add, x, total, self._packed, self._bias, "add")
        return out

    def _run(self, x: torch.Tensor, product: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
        small = x.dtype is torch.float32 and x.shape[0] * self._size < _SHARED
        return on_one_thread(product, *args) if small else product(*args)

    def thaw(self) -> torch.Tensor:
        """Return the matrix itself, which may be written to until `freeze`; products are slower until then."""
        if self._plain is None:
            assert self._packed is not None
            self._plain, self._packed, self._thin = self._packed.to_dense(), None, None
        return self._plain

    def freeze(self) -> None:
        """Pack the matrix again after `thaw`. The tensor that `thaw` gave is no longer part of the product."""
        self._pack()
