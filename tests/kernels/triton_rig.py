"""Runs the Triton kernels in Triton's interpreter over a poisoned pool, and the cases for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import numpy
import pytest
import torch

from services.executor.kernels.layout import GroupSpec, RowLayout, make_layout, page_rows
from services.executor.kernels.reference import lora_reference
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.variants import VARIANTS, Variant
from services.executor.kernels.work import Resident, WorkLimits

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not tested here")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    pytest.skip("the interpreter of Triton before 3.7 does not work with numpy 2.4", allow_module_level=True)
from triton.runtime import interpreter as interpreted  # noqa: E402

from services.executor.kernels import triton_lora  # noqa: E402
from tests.kernels.lanes import Lanes  # noqa: E402

assert triton_lora.interpreted(), "tests/conftest.py asks for the interpreter before anything imports Triton"


@contextmanager
def overflow_checks(on: bool) -> Iterator[None]:
    """Let the interpreter check every 32-bit sum and product, as it does by default: a third of its time."""
    builder = interpreted.interpreter_semantic.builder
    before = builder.options
    builder.options = replace(before, sanitize_overflow=on)
    yield
    builder.options = before


@contextmanager
def quicker_interpreter() -> Iterator[None]:
    """Let the interpreter find out once what it otherwise finds out again in every call; it computes the same.

    It prepares the whole language for each call of a function like `tl.sum`, builds a table for each look-up of a
    dtype, and takes bfloat16 apart to widen it: together more than half of its time.
    """
    prepare, call, widen = interpreted._patch_lang, interpreted.GridExecutor.__call__, interpreted._convert_float
    dtype_of, tl = cache(interpreted._get_np_dtype), interpreted.tl
    prepared: dict[int, object] = {}

    def prepare_once(function: object) -> object:
        key = id(function.__globals__)
        if key not in prepared:
            prepared[key] = prepare(function)
        return prepared[key]

    def launch(self: object, *args: object, **kwargs: object) -> None:
        prepared.clear()  # the launch takes its own preparation back
        call(self, *args, **kwargs)

    def widen_quickly(data: object, source: object, target: object, rounding: object) -> object:
        if (source, target) != (tl.bfloat16, tl.float32):
            return widen(data, source, target, rounding)
        return data.astype(numpy.uint32) << 16

    def look_up(kind: object) -> object:
        return numpy.dtype(numpy.uint64) if isinstance(kind.scalar, tl.pointer_type) else dtype_of(kind.scalar)

    with (
        mock.patch.object(interpreted, "_patch_lang", prepare_once),
        mock.patch.object(interpreted, "_get_np_dtype", look_up),
        mock.patch.object(interpreted, "_convert_float", widen_quickly),
        mock.patch.object(interpreted.GridExecutor, "__call__", launch),
    ):
        yield


PAGE = 8
RANKS = (1, 2, 3, 4, 8, 12, 16, 24, 63, 64, 128, 256)
ROWS = (1, 2, 15, 16, 17, 33, 127, 129)
DIMS = (64, 96, 172, 576, 1536)
OUTS = ((64,), (40, 24), (172, 40), (96, 33, 33), (300,))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Against float64 sums of the same inputs, deltas of about 1: float32 sums, one rounding of y, and in the prefill
# kernels one of the shrunk rows.
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (3e-2, 2e-2), torch.float16: (4e-3, 4e-3)}
BASE = 2  # rows of the base in a mix
GUARD = 4  # rows around y that must not change


def group_of(size: int, outs: tuple[int, ...], layers: int = 2) -> GroupSpec:
    """Return a group of its own, called g."""
    paths = tuple(tuple(f"l{i}.m{j}" for j in range(len(outs))) for i in range(layers))
    return GroupSpec(name="g", in_features=size, out_features=outs, paths=paths)


class Rig:
    """Adapters of `ranks` on shuffled pages of a pool that is NaN elsewhere; x, y and scratch poisoned likewise."""

    def __init__(self, group: GroupSpec, ranks: Sequence[int], dtype: torch.dtype, *, seed: int = 0) -> None:
        self.group, self.ranks, self.dtype = group, tuple(ranks), dtype
        self.random = torch.Generator().manual_seed(seed)
        counts = [-(-rank // PAGE) for rank in ranks]
        self.page_count = sum(counts) + 3
        order = list(range(self.page_count))
        random.Random(seed).shuffle(order)
        self.residents = []
        nan, rows, subs = float("nan"), self.page_count * PAGE, len(group.out_features)
        self.a = torch.full((group.layers, rows, subs, group.in_features), nan, dtype=dtype)
        self.b = torch.full((group.layers, rows, sum(group.out_features)), nan, dtype=dtype)
        self.scale = torch.full((group.layers, rows, subs), nan)
        for rank, count in zip(ranks, counts, strict=True):
            pages, order = tuple(order[:count]), order[count:]
            self.residents.append(Resident(pages, {"g": rank}))
            index = torch.tensor(page_rows(pages, rank=rank, rows_per_page=PAGE), dtype=torch.long)
            self.a[:, index] = self.noise(group.layers, rank, subs, group.in_features) * group.in_features**-0.5
            self.b[:, index] = self.noise(group.layers, rank, self.b.shape[2]) * max(rank, 1) ** -0.5
            drawn = torch.rand(group.layers, 1, subs, generator=self.random) + 0.5
            self.scale[:, index] = drawn.expand(-1, rank, -1)

    def noise(self, *shape: int) -> torch.Tensor:
        """Return normal numbers in the rig's dtype."""
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def inputs(self, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (y, x); rows of the base are NaN in both, so that reading one shows in the result."""
        y = self.noise(layout.row_count, sum(self.group.out_features))
        x = self.noise(layout.row_count, self.group.in_features)
        y[: layout.base_rows] = x[: layout.base_rows] = float("nan")
        return y, x

    def expected(self, y: torch.Tensor, x: torch.Tensor, layout: RowLayout, layer: int) -> torch.Tensor:
        """Return what the twin makes of y."""
        out, column = y.clone(), 0
        for sub, width in enumerate(self.group.out_features):
            part = out[:, column : column + width]
            lora_reference(
                part,
                x,
                layout=layout,
                a_pool=self.a[layer, :, sub],
                b_pool=self.b[layer, :, column : column + width],
                pages=[r.pages for r in self.residents],
                ranks=self.ranks,
                scales=[float(self.scale[layer, r.pages[0] * PAGE, sub]) if r.pages else 0.0 for r in self.residents],
                rows_per_page=PAGE,
            )
            column += width
        return out

    def kernels(self, variant: Variant, layout: RowLayout) -> triton_lora.TritonLora:
        """Return the kernels with a scratch full of NaN and limits that just hold the layout."""
        limits = WorkLimits(
            rows=max(layout.row_count, 1),
            adapters=max(len(layout.segments), 1),
            rank=max(self.ranks, default=1) or 1,
            pages=self.page_count,
        )
        pool = {"g": Bank(self.a, self.b, self.scale, self.group.out_features)}
        lora = triton_lora.TritonLora(
            (self.group,), pool, variant=variant, rows_per_page=PAGE, limits=limits, multiprocessors=1
        )
        lora.scratch.fill_(float("nan"))
        return lora

    def run(
        self, variant: Variant, y: torch.Tensor, x: torch.Tensor, layout: RowLayout, layer: int,
        residents: Sequence[Resident] | None = None, lanes: Lanes | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the kernels' y. Asserts that only the scratch that the work needs, and no row around y, is written."""
        lora = self.kernels(variant, layout)
        residents = self.residents if residents is None else residents
        if lanes is not None:
            lora._programs = 1
            self.plan(lanes, variant, layout)
        around = torch.full((y.shape[0] + 2 * GUARD, y.shape[1]), 7.0, dtype=y.dtype)
        around[GUARD:-GUARD] = y
        inner = around[GUARD:-GUARD]
        lora.load(layout, residents).add("g", layer, inner, x)
        assert (around[:GUARD] == 7).all()
        assert (around[-GUARD:] == 7).all()
        pairs = sum(s.rows * residents[s.adapter].ranks.get("g", 0) for s in layout.segments)
        subs = len(self.group.out_features)
        numbers = pairs * subs * variant.splits(self.group.in_features)
        assert not lora.scratch[:numbers].isnan().any()
        assert lora.scratch[numbers:].isnan().all()
        return inner.clone()

    def plan(self, lanes: Lanes, variant: Variant, layout: RowLayout) -> None:
        """Tell `lanes` the units of shrink and expand, record by record as `make_work` cuts them."""
        todo = [(-(-s.rows // variant.rows), -(-self.ranks[s.adapter] // variant.ranks)) for s in layout.segments]
        subs, splits = len(self.group.out_features), variant.splits(self.group.in_features)
        tile = variant.rows * variant.ranks if variant.kind == "decode" else max(variant.rows, variant.ranks)
        shrink = [1] * sum(rows * ranks for rows, ranks in todo)
        lanes.plan(shrink, per=subs * splits, numbers=tile * variant.in_cols)
        expand = [ranks for rows, ranks in todo for _ in range(rows if ranks else 0)]
        blocks = sum(-(-width // variant.out_cols) for width in self.group.out_features)
        lanes.plan(expand, per=blocks, numbers=tile * variant.out_cols)


def assert_same(got: torch.Tensor, expected: torch.Tensor, base: int = BASE) -> None:
    """Base rows still NaN, the others finite and equal to the twin's."""
    atol, rtol = TOLERANCE[got.dtype]
    assert got[:base].isnan().all()
    torch.testing.assert_close(got[base:], expected[base:], atol=atol, rtol=rtol)


@dataclass(frozen=True, slots=True)
class Case:
    """One launch: segments are (rank, rows); the mix has base rows before it and an adapter without rank in it."""

    variant: str
    dim: int
    outs: tuple[int, ...]
    dtype: torch.dtype
    segments: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.variant}-{self.dim}-{str(self.dtype)[6:]}-{len(self.segments)}"

    def rig(self) -> tuple[Rig, RowLayout]:
        """Return the pool and the layout."""
        ranks = [*(rank for rank, _ in self.segments), 0]
        rows = [*(rows for _, rows in self.segments), 2]
        rig = Rig(group_of(self.dim, self.outs), ranks, self.dtype, seed=len(rows))
        return rig, make_layout([None, *range(len(rows))], [BASE, *rows])


def one_by_one() -> list[Case]:
    """Return a small launch for every variant and width; dtypes and outputs take turns."""
    cases = []
    for number, (variant, dim) in enumerate(itertools.product(VARIANTS, DIMS)):
        outs = OUTS[(number + number // len(DIMS)) % len(OUTS)]
        many = 127 if variant.startswith("triton-prefill-64") else 17
        segments = ((3, many), (63 if dim < 172 else 24, 1))
        cases.append(Case(variant, dim, outs, DTYPES[number % 3], segments))
    return cases


# What the whole product's launches write, and in which dtype, by width: what is cheap, and every dtype.
WRITES = {
    64: ((64,), torch.float32),
    96: ((40, 24), torch.bfloat16),
    172: ((64,), torch.float16),
    576: ((64,), torch.bfloat16),
    1536: ((40,), torch.float16),
}


def whole_product() -> list[Case]:
    """Return a launch for every variant and width that has every rank with every number of rows.

    What shows nothing new is left out where a record is few rows, for it takes the interpreter longest: above 17 rows the
    variant of one row, and at 127 rows both variants for decoding, have ranks to 8 only.
    """
    cases = []
    for variant, dim in itertools.product(VARIANTS, DIMS):
        most = {1: 17, 4: 126}.get(VARIANTS[variant].rows, 129)
        pairs = itertools.product(RANKS, ROWS)
        segments = [(k, rows) for k, rows in pairs if k <= 8 or rows <= most or (rows == 129 and most == 126)]
        cases.append(Case(variant, dim, *WRITES[dim], tuple(segments)))
    return cases
