"""Every LoRA path against the slow twin: odd ranks and shapes, NaN around, foreign overflow, swapped adapters."""

from __future__ import annotations

import random

import pytest
import torch

from services.executor.engine.device_pool import DevicePool
from services.executor.engine.staging import Staged, StagedGroup
from services.executor.kernels.dispatch import BASE, MIXED, PAGED, SEGMENTED, choose_path
from services.executor.kernels.layout import GroupSpec, RowLayout, Segment, make_layout, page_rows
from services.executor.kernels.reference import lora_reference
from services.executor.kernels.shrink_expand import PagedStep, make_run
from services.executor.model.lora_linear import GroupBatch

PAGE = 8
PATHS = [PAGED, SEGMENTED, MIXED]


def make_staged(group: GroupSpec, name: str, rank: int, seed: int) -> Staged:
    g = torch.Generator().manual_seed(seed)
    a = (
        torch.randn(group.layers, rank, len(group.out_features), group.in_features, generator=g)
        * group.in_features**-0.5
    )
    b = torch.cat([torch.randn(group.layers, rank, out, generator=g) for out in group.out_features], dim=2)
    scale = torch.rand(group.layers, 1, len(group.out_features), generator=g).repeat(1, rank, 1) + 0.5
    return Staged(name, rank, 0, {group.name: StagedGroup(rank, a, b, scale)})


class Bench:
    """A poisoned pool with adapters on shuffled pages."""

    def __init__(self, group: GroupSpec, ranks: list[int]) -> None:
        self.group, self.ranks = group, ranks
        counts = [-(-r // PAGE) for r in ranks]
        order = list(range(sum(counts) + 3))
        random.Random(3).shuffle(order)
        self.pool = DevicePool((group,), page_count=len(order), rows_per_page=PAGE, poison=True)
        self.pages, self.staged = [], []
        for i, (rank, count) in enumerate(zip(ranks, counts, strict=True)):
            pages, order = tuple(order[:count]), order[count:]
            staged = make_staged(group, f"a{i}", rank, seed=i)
            self.pool.prepare(pages)
            for _ in self.pool.write(staged, pages):
                pass
            self.pool.bind(staged, pages)
            self.pages.append(pages)
            self.staged.append(staged)
        self.bank = self.pool.banks[group.name]
        self.adapters = [self.pool._bound[f"a{i}"].groups[group.name] for i in range(len(ranks))]

    def expected(self, y: torch.Tensor, x: torch.Tensor, layout: RowLayout, layer: int) -> torch.Tensor:
        out, column = y.clone(), 0
        for sub, width in enumerate(self.group.out_features):
            part = out[:, column : column + width].clone()
            lora_reference(
                part,
                x,
                layout=layout,
                a_pool=self.bank.a[layer, :, sub],
                b_pool=self.bank.b[layer, :, column : column + width],
                pages=self.pages,
                ranks=self.ranks,
                scales=[float(s.groups[self.group.name].scale[layer, 0, sub]) for s in self.staged],
                rows_per_page=PAGE,
            )
            out[:, column : column + width] = part
            column += width
        return out

    def run(self, path: str, y: torch.Tensor, x: torch.Tensor, layout: RowLayout, layer: int) -> torch.Tensor:
        """PAGED or SEGMENTED for all segments, whatever their rows; MIXED alternates, so few rows are not adjacent."""
        out = y.clone()
        dense = {PAGED: [], SEGMENTED: list(layout.segments), MIXED: list(layout.segments[::2])}[path]
        few = [s for s in layout.segments if s not in dense]
        rows = [row for s in few for row in range(s.start, s.end)]
        ranks = [self.adapters[s.adapter].rows for s in few for _ in range(s.rows)]
        GroupBatch(
            tuple((slice(s.start, s.end), self.adapters[s.adapter]) for s in dense),
            PagedStep(self.bank, ranks) if rows else None,
            torch.tensor(rows),
        ).add(out, x, layer)
        return out


def group_of(size: int, outs: tuple[int, ...], layers: int = 2) -> GroupSpec:
    paths = tuple(tuple(f"l{i}.m{j}" for j in range(len(outs))) for i in range(layers))
    return GroupSpec(name="g", in_features=size, out_features=outs, paths=paths)


def layout_of(rows: int, adapters: int, base: int) -> RowLayout:
    """`base` base rows, the rest cut into uneven runs."""
    left, runs = rows - base, []
    for i in range(adapters):
        count = left if i == adapters - 1 else min(left, 1 + (left - 1) // 2 if left else 0)
        runs.append((i, count))
        left -= count
    return make_layout([None, *[i for i, _ in runs]], [base, *[c for _, c in runs]])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("size", [64, 96, 128, 172])
def test_odd_ranks_and_shapes_equal_the_twin(path: str, rows: int, size: int) -> None:
    ranks = [1, 2, 3, 4, 8, 12, 16, 24, 63, 64]
    bench = Bench(group_of(size, (172, 40)), ranks)
    layout = layout_of(rows, len(ranks), base=rows // 3)
    torch.manual_seed(rows)
    x, y = torch.randn(rows, size), torch.randn(rows, 212)
    got = bench.run(path, y, x, layout, layer=1)
    torch.testing.assert_close(got, bench.expected(y, x, layout, 1), atol=1e-4, rtol=1e-4)
    assert torch.equal(got[: layout.base_rows], y[: layout.base_rows])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [127, 129, 400, 513])
def test_many_rows_and_grouped_heads(path: str, rows: int) -> None:
    bench = Bench(group_of(64, (96, 32, 32)), [5, 16])
    layout = layout_of(rows, 2, base=7)
    torch.manual_seed(rows)
    x, y = torch.randn(rows, 64), torch.randn(rows, 160)
    got = bench.run(path, y, x, layout, layer=0)
    torch.testing.assert_close(got, bench.expected(y, x, layout, 0), atol=1e-4, rtol=1e-4)
    assert torch.equal(got[:7], y[:7])


def test_a_bfloat16_base_is_added_to_in_float32_and_rounded_once() -> None:
    bench = Bench(group_of(64, (96, 32, 32)), [5, 16])
    layout = make_layout([None, 0, 1], [7, 20, 3])
    torch.manual_seed(1)
    x, y = torch.randn(30, 64).bfloat16(), torch.randn(30, 160).bfloat16()
    batch = bench.pool.arrange(layout, ("a0", "a1"))
    got = y.clone()
    batch.add("g", 1, got, x)
    assert torch.equal(got, bench.expected(y.float(), x.float(), layout, 1).bfloat16())
    assert batch.path == MIXED


def test_the_oracle_notices_a_wrong_adapter_and_a_wrong_layer() -> None:
    bench = Bench(group_of(64, (64,)), [8, 8])
    x, y = torch.randn(8, 64), torch.zeros(8, 64)
    right, swapped = RowLayout(8, 0, (Segment(0, 8, 0),)), RowLayout(8, 0, (Segment(0, 8, 1),))
    for path in PATHS:
        assert not torch.allclose(bench.run(path, y, x, swapped, 0), bench.expected(y, x, right, 0), atol=1e-2)
        assert not torch.allclose(bench.run(path, y, x, right, 1), bench.expected(y, x, right, 0), atol=1e-2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [3e38, float("nan")])
def test_a_foreign_adapters_overflow_stays_in_its_own_rows(path: str, bad: float) -> None:
    bench = Bench(group_of(64, (64,)), [4, 4])
    bench.bank.a[:, bench.adapters[0].rows] = bad
    layout = make_layout([None, 0, 1], [2, 2, 2])
    x, y = torch.full((6, 64), 10.0), torch.zeros(6, 64)
    got = bench.run(path, y, x, layout, 0)
    assert not torch.isfinite(got[2:4]).all()
    assert torch.isfinite(got[4:]).all()
    assert torch.equal(got[:2], y[:2])


def test_a_rows_numbers_do_not_depend_on_the_adapters_beside_it() -> None:
    bench = Bench(group_of(96, (96, 32, 32)), [12, 64, 3])
    torch.manual_seed(3)
    x, y = torch.randn(6, 96), torch.randn(6, 160)
    alone = bench.run(PAGED, y[2:4], x[2:4], make_layout([1], [2]), 0)
    beside = bench.run(PAGED, y, x, make_layout([0, 1, 2], [2, 2, 2]), 0)
    assert torch.equal(alone, beside[2:4])


def test_arrangements_are_kept_but_never_stale() -> None:
    """E5: the same name on the same pages with other numbers gives the other numbers; scrubbed pages are unreadable."""
    group = group_of(64, (64,))
    bench = Bench(group, [8])
    layout = make_layout([0], [2])
    x = torch.randn(2, 64)

    def answer() -> torch.Tensor:
        y = torch.zeros(2, 64)
        bench.pool.arrange(layout, ("a0",)).add("g", 0, y, x)
        return y

    before = answer()
    assert bench.pool.arrange(layout, ("a0",)) is bench.pool.arrange(layout, ("a0",))
    pages = bench.pages[0]
    bench.pool.scrub(pages)
    assert bench.bank.a[:, page_rows(pages, rank=8, rows_per_page=PAGE)].isnan().all()
    with pytest.raises(KeyError):
        bench.pool.arrange(layout, ("a0",))
    other = make_staged(group, "a0", 8, seed=99)
    bench.pool.prepare(pages)
    for _ in bench.pool.write(other, pages):
        pass
    bench.pool.bind(other, pages)
    assert not torch.allclose(answer(), before, atol=1e-2)


def test_adjacent_pages_are_used_in_place_and_scattered_ones_too() -> None:
    bench = Bench(group_of(64, (64,)), [16, 16])
    pool_rows = torch.arange(8, 24)
    run = make_run(bench.bank, pool_rows.tolist(), [[1.0], [1.0]])
    assert run is not None
    assert run.shrink[0].untyped_storage().data_ptr() == bench.bank.a.untyped_storage().data_ptr()
    assert make_run(bench.bank, [8, 9, 11], [[1.0], [1.0]]) is None


def test_layouts() -> None:
    assert make_layout([None, 0, 0, 1], [1, 2, 1, 3]) == RowLayout(7, 1, (Segment(1, 4, 0), Segment(4, 7, 1)))
    with pytest.raises(ValueError, match="come first"):
        make_layout([0, None], [1, 1])
    with pytest.raises(ValueError, match="adjacent"):
        make_layout([0, 1, 0], [1, 1, 1])
    with pytest.raises(ValueError, match="does not fit"):
        page_rows((1,), rank=9, rows_per_page=8)
    assert page_rows((5, 2), rank=10, rows_per_page=8) == [40, 41, 42, 43, 44, 45, 46, 47, 16, 17]


def test_path_choice() -> None:
    assert choose_path(make_layout([None], [4]), device_type="cpu") == BASE
    assert choose_path(make_layout([0], [1]), device_type="cpu") == PAGED
    assert choose_path(make_layout([0, 1], [1, 1]), device_type="cpu") == PAGED
    assert choose_path(make_layout([0, 1], [90, 12]), device_type="cpu") == SEGMENTED
    assert choose_path(make_layout([0, 1], [90, 1]), device_type="cpu") == MIXED
    with pytest.raises(ValueError, match="no LoRA kernel"):
        choose_path(make_layout([0], [1]), device_type="abacus")
