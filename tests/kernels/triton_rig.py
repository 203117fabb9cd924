"""Runs the Triton kernels in Triton's interpreter over a poisoned pool, and a covering set of cases for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from services.executor.kernels.layout import GroupSpec, RowLayout, page_rows
from services.executor.kernels.reference import lora_reference
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.variants import VARIANTS, Variant
from services.executor.kernels.work import Resident, WorkLimits

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not tested here")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    pytest.skip("the interpreter of Triton before 3.7 does not work with numpy 2.4", allow_module_level=True)
from triton.runtime.interpreter import interpreter_builder  # noqa: E402

from services.executor.kernels import triton_lora  # noqa: E402

assert triton_lora.interpreted(), "tests/conftest.py asks for the interpreter before anything imports Triton"


@contextmanager
def overflow_checks(on: bool) -> Iterator[None]:
    """Let the interpreter check every 32-bit sum and product, as it does by default: a third of its time."""
    before = interpreter_builder.options
    interpreter_builder.options = replace(before, sanitize_overflow=on)
    yield
    interpreter_builder.options = before


PAGE = 8
RANKS = (1, 2, 3, 4, 8, 12, 16, 24, 63, 64, 128, 256)
ROWS = (1, 2, 15, 16, 17, 33, 127, 129)
DIMS = (64, 96, 172, 576, 1536)
OUTS = ((64,), (40, 24), (172, 40), (96, 33, 33), (300,))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Against float64 sums of the same inputs, deltas of about 1: float32 sums, one rounding of y, and in the prefill
# kernels one of the shrunk rows.
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (3e-2, 2e-2), torch.float16: (4e-3, 4e-3)}
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
        residents: Sequence[Resident] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the kernels' y. Asserts that only the scratch that the work needs, and no row around y, is written."""
        lora = self.kernels(variant, layout)
        residents = self.residents if residents is None else residents
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


def wanted() -> set[tuple[object, object]]:
    """Return the pairs that the cases cover: every two of rank, rows, width and variant, each value with each.

    127 rows with a decode variant are left out: 129 are as odd, and the interpreter takes seconds for each of the two.
    """
    facts = {"rank": RANKS, "rows": ROWS, "dim": DIMS, "variant": tuple(VARIANTS)}
    named = [[(name, value) for value in values] for name, values in facts.items()]
    pairs = {pair for one, other in itertools.combinations(named, 2) for pair in itertools.product(one, other)}
    return pairs - {(("rows", 127), ("variant", v)) for v in VARIANTS if "decode" in v}


def covered(case: Case) -> set[tuple[object, object]]:
    """Return the pairs that one case covers."""
    found: set[tuple[object, object]] = set()
    for rank, rows in case.segments:
        found |= set(
            itertools.combinations((("rank", rank), ("rows", rows), ("dim", case.dim), ("variant", case.variant)), 2)
        )
    return found


# The variant whose launch has every rank with every number of rows, and the width at which each of the others has every
# rank (with few rows) and every number of rows (with few ranks): the cheapest that together meet every width.
GRID = ("triton-prefill-64x64", 64)
COLUMNS = {
    "triton-decode-1x8": 96,
    "triton-decode-4x8": 576,
    "triton-prefill-16x16": 172,
    "triton-prefill-16x64": 1536,
    "triton-prefill-64x16": 64,
}


def cover() -> list[Case]:
    """Return one case per variant and width whose segments together cover `wanted()`. Deterministic."""
    cases = []
    for number, (variant, dim) in enumerate(itertools.product(VARIANTS, DIMS)):
        if (variant, dim) == GRID:
            segments = list(itertools.product(RANKS, ROWS))
        elif COLUMNS.get(variant) == dim:
            segments = [(rank, 1 + i % 2) for i, rank in enumerate(RANKS)]
            rows = [rows for rows in ROWS if rows != 127 or "decode" not in variant]
            segments += list(zip(itertools.cycle((1, 2, 3, 4, 8)), rows, strict=False))
        else:
            segments = [(3, 127 if variant == GRID[0] else 2), (16, 1)]
        outs = OUTS[(number + number // len(DIMS)) % len(OUTS)]
        cases.append(Case(variant, dim, outs, DTYPES[number % 3], tuple(segments)))
    return cases
