"""Runs the Triton kernels in Triton's interpreter over a poisoned pool, and a covering set of cases for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from services.executor.kernels.layout import GroupSpec, RowLayout, make_layout, page_rows
from services.executor.kernels.reference import lora_reference
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.variants import VARIANTS, Variant
from services.executor.kernels.work import RECORD, GroupShape, Resident, WorkLimits, make_work

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not tested here")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    pytest.skip("the interpreter of Triton before 3.7 does not work with numpy 2.4", allow_module_level=True)
from services.executor.kernels import triton_lora  # noqa: E402

assert triton_lora.interpreted(), "tests/conftest.py asks for the interpreter before anything imports Triton"

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


def units(variant: Variant, shape: GroupShape, rank: int, rows: int) -> int:
    """Return how many passes of the kernels' outer loops a segment takes: what the interpreter's time grows with."""
    layout = make_layout([0], [rows])
    pages = [range(-(-rank // PAGE))]
    work = make_work(
        layout, ranks=[rank], pages=pages, rows_per_page=PAGE, block_rows=variant.rows, block_ranks=variant.ranks
    )
    blocks = sum(-(-out // variant.out_cols) for out in shape.out_features)
    shrink = len(work.shrink) // RECORD * len(shape.out_features) * variant.splits(shape.in_features)
    return shrink + len(work.expand) // RECORD * blocks


def wanted() -> set[tuple[object, object]]:
    """Return the pairs that the cases cover: rank x rows, variant x rank, variant x rows, width x rank.

    127 rows with a decode variant are left out: 129 are as odd, and the interpreter takes a second for each of the two.
    """
    ranks, rows = [("rank", r) for r in RANKS], [("rows", r) for r in ROWS]
    variants, dims = [("variant", v) for v in VARIANTS], [("dim", d) for d in DIMS]
    pairs = ((ranks, rows), (variants, ranks), (variants, rows), (dims, ranks))
    spared = {(("variant", v), ("rows", 127)) for v in VARIANTS if "decode" in v}
    return {pair for one, other in pairs for pair in itertools.product(one, other)} - spared


def _pairs(variant: str, dim: int, rank: int, rows: int) -> set[tuple[object, object]]:
    both = (("rank", rank), ("rows", rows))
    return {both, *itertools.product((("variant", variant), ("dim", dim)), both)}


def cover() -> list[Case]:
    """Return one case per variant and width whose segments together cover `wanted()`. Deterministic, cheap first."""
    left = wanted()
    cases = []
    # Variants with large blocks first: what is expensive for the small ones is covered by then.
    for number, (variant, dim) in enumerate(itertools.product(reversed(VARIANTS), DIMS)):
        outs = OUTS[(number + number // len(DIMS)) % len(OUTS)]
        shape = GroupShape(dim, outs)
        price = {p: 1 + units(VARIANTS[variant], shape, *p) for p in itertools.product(RANKS, ROWS)}
        chosen: list[tuple[int, int]] = []
        budget = 400
        while True:
            gain = {p: len(_pairs(variant, dim, *p) & left) for p in price if price[p] <= budget}
            best = max(gain, key=lambda p: (gain[p] / price[p], p), default=None)
            if best is None or not gain[best]:
                break
            chosen.append(best)
            budget -= price[best]
            left -= _pairs(variant, dim, *best)
        cases.append(Case(variant, dim, outs, DTYPES[number % 3], tuple(chosen) or ((3, 2), (16, 1))))
    return cases
