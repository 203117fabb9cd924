"""The Triton kernels in Triton's interpreter against the float64 twin: every launch is a poisoned mixed batch.

Base rows, x of base rows, free pages, the tail of half used pages and the scratch hold NaN; every case has base rows and
an adapter without rank. Ranks, rows, widths and variants all with each other are in `test_triton_product.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from services.executor.kernels import triton_decode, triton_prefill
from services.executor.kernels.layout import RowLayout, Segment, make_layout
from services.executor.kernels.variants import VARIANTS
from services.executor.kernels.work import Resident
from tests.kernels.lanes import in_lanes
from tests.kernels.triton_rig import (
    BASE,
    PAGE,
    Case,
    Rig,
    assert_same,
    group_of,
    one_by_one,
    overflow_checks,
)

pytestmark = pytest.mark.usefixtures("interpreter")


def layout_of(rows: tuple[int, ...], base: int = BASE) -> RowLayout:
    return make_layout([None, *range(len(rows))], [base, *rows])


@pytest.mark.parametrize("case", one_by_one(), ids=str)
def test_every_variant_equals_the_twin_and_itself_in_lanes(case: Case) -> None:
    rig, layout = case.rig()
    y, x = rig.inputs(layout)
    got = rig.run(VARIANTS[case.variant], y, x, layout, 1)
    assert_same(got, rig.expected(y, x, layout, 1))
    assert torch.equal(got[-2:], y[-2:])  # the adapter without rank in this group
    with in_lanes(triton_decode, triton_prefill) as lanes:
        together = rig.run(VARIANTS[case.variant], y, x, layout, 1, lanes=lanes)
    assert torch.equal(together[BASE:], got[BASE:]), "bit by bit"


@pytest.mark.parametrize("name", ["triton-decode-4x8", "triton-prefill-16x16"])
def test_no_offset_wraps_in_a_pool_of_billions_of_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that fill a GPU: the last rows of one layer lie beyond what 32 bits count, as an output head's do on 139 GiB.

    Nothing but the pages in use is touched, so the machine needs no such memory: the interpreter would copy all of it
    back onto itself after the launch. Overflow checks are on.
    """
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    outs, rows = 4096, 2**31 // 4096 + 2 * PAGE
    rig = Rig(group_of(outs, (outs,), layers=1), [], torch.float16)
    last = rows // PAGE - 1
    rig.residents, rig.ranks = [Resident((last, 0), {"g": 9})], (9,)
    # Not zeros: those would be written.
    rig.a = torch.empty(1, rows, 1, outs, dtype=torch.float16)
    rig.b = torch.empty(1, rows, outs, dtype=torch.float16)
    rig.scale, rig.page_count = torch.ones(1, rows, 1), last + 1
    for pool_row in (*range(last * PAGE, last * PAGE + PAGE), 0):
        rig.a[0, pool_row] = rig.b[0, pool_row] = 0.0
        rig.a[0, pool_row, :, -8:] = rig.noise(1, 8)
        rig.b[0, pool_row, -8:] = rig.noise(8)
    assert min(rig.a.numel(), rig.b.numel()) > 2**31
    layout = layout_of((1,), base=0)
    y, x = torch.zeros(1, outs, dtype=torch.float16), torch.zeros(1, outs, dtype=torch.float16)
    x[:, -8:] = rig.noise(1, 8)
    expected = rig.expected(y, x, layout, 0)
    wide = replace(VARIANTS[name], in_cols=4096, out_cols=4096, max_splits=1)
    with overflow_checks(True):
        assert_same(rig.run(wide, y, x, layout, 0), expected, 0)
    assert expected.any()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_large_scale_takes_nothing_of_float16s_range(name: str) -> None:
    """What is between shrink and expand lies within 16 bits before it is scaled, and not after."""
    rig = Rig(group_of(64, (24,), layers=1), [3], torch.float16)
    rig.a.nan_to_num_(0.0).mul_(100)
    rig.b.mul_(2e-3)
    rig.scale.mul_(400)
    layout = layout_of((2,))
    y, x = rig.inputs(layout)
    x.mul_(8)
    expected = rig.expected(y, x, layout, 0)
    assert (x[BASE:].double() @ rig.a[0, :, 0].double().T).abs().max() * 400 > 65504
    got = rig.run(VARIANTS[name], y, x, layout, 0)
    torch.testing.assert_close(got[BASE:], expected[BASE:], atol=1.0, rtol=1e-2)


@pytest.mark.parametrize("rows", [400, 513, 2048])
def test_long_prefills_stay_finite(rows: int) -> None:
    rig = Rig(group_of(64, (64,)), [5, 16], torch.bfloat16)
    layout = layout_of((rows - 3, 3))
    y, x = rig.inputs(layout)
    got = rig.run(VARIANTS["triton-prefill-64x16"], y, x, layout, 0)
    assert_same(got, rig.expected(y, x, layout, 0))


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_without_adapters_write_nothing(name: str) -> None:
    rig = Rig(group_of(64, (64,)), [8], torch.float32)
    for layout in (layout_of((), base=5), layout_of((0,), base=3), layout_of((), base=0)):
        y, x = rig.inputs(layout)
        assert rig.run(VARIANTS[name], y, x, layout, 0).isnan().all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_rows_numbers_do_not_depend_on_its_neighbours(name: str) -> None:
    """Bit-equal alone and in company: sums are cut by the model's shape, never by the step."""
    rig = Rig(group_of(1024, (64,)), [9, 3, 16], torch.bfloat16)
    layout = layout_of((1, 2, 3))
    y, x = rig.inputs(layout)
    together = rig.run(VARIANTS[name], y, x, layout, 0)
    for segment in layout.segments:
        own = slice(segment.start, segment.end)
        alone = RowLayout(segment.rows, 0, (Segment(0, segment.rows, segment.adapter),))
        assert torch.equal(rig.run(VARIANTS[name], y[own], x[own], alone, 0), together[own])


@pytest.mark.parametrize("name", VARIANTS)
def test_mutations_are_noticed(name: str) -> None:
    """A wrong page, a swapped segment, a dropped tail rank, a wrong layer: each breaks the comparison."""
    rig = Rig(group_of(64, (64,)), [17, 17], torch.float32)
    layout = layout_of((3, 3))
    y, x = rig.inputs(layout)
    expected = rig.expected(y, x, layout, 0)
    first, second = rig.residents
    swapped = RowLayout(8, 2, (Segment(2, 5, 1), Segment(5, 8, 0)))
    wrong_page = Resident((first.pages[0], second.pages[1], first.pages[2]), first.ranks)
    short = Resident(first.pages, {"g": 16})
    shifted = RowLayout(8, 2, (Segment(2, 4, 0), Segment(4, 8, 1)))
    variant = VARIANTS[name]
    wrong = [
        rig.run(variant, y, x, layout, 0, [wrong_page, second]),
        rig.run(variant, y, x, layout, 0, [short, second]),
        rig.run(variant, y, x, swapped, 0),
        rig.run(variant, y, x, shifted, 0),
        rig.run(variant, y, x, layout, 1),
    ]
    assert_same(rig.run(variant, y, x, layout, 0), expected)
    for got in wrong:
        with pytest.raises(AssertionError):
            assert_same(got, expected)


def test_one_set_of_buffers_serves_step_after_step() -> None:
    """What a captured graph does: same buffers, same grid, other layouts, ranks and pages, fewer adapters, none."""
    rig = Rig(group_of(96, (64, 33)), [3, 16, 24], torch.float32)
    steps = [layout_of((1, 1, 1)), layout_of((2,)), layout_of((), base=5), make_layout([None, 2, 0], [1, 3, 1])]
    biggest = layout_of((2, 2, 2))
    for name in ("triton-decode-1x8", "triton-prefill-16x16"):
        lora = rig.kernels(VARIANTS[name], biggest)
        buffers = (lora.scratch.data_ptr(), lora.memory_bytes)
        for layout in (*steps, *steps):
            y, x = rig.inputs(layout)
            got = y.clone()
            lora.load(layout, rig.residents).add("g", 0, got, x)
            assert_same(got, rig.expected(y, x, layout, 0), layout.base_rows)
        assert (lora.scratch.data_ptr(), lora.memory_bytes) == buffers
        with pytest.raises(ValueError, match=r"scratch|metadata"):
            lora.load(layout_of((40, 40, 40)), rig.residents)


def test_the_launcher_refuses_tensors_it_was_not_compiled_for() -> None:
    rig = Rig(group_of(64, (64,)), [8], torch.bfloat16)
    layout = layout_of((2,))
    y, x = rig.inputs(layout)
    lora = rig.kernels(VARIANTS["triton-decode-1x8"], layout)
    step = lora.load(layout, rig.residents)
    crooked = torch.zeros(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64)
    fewer = (y[:3].clone(), x)
    for bad_y, bad_x in (
        fewer,
        (y, x[:3].clone()),
        (y.float(), x),
        (y, x[:, :32]),
        (torch.zeros(64, 4).bfloat16().t(), x),
        (y, crooked),
    ):
        with pytest.raises(ValueError, match=r"g: (a tensor|. and . rows)"):
            step.add("g", 0, bad_y, bad_x)


def test_a_pool_whose_layers_begin_in_the_middle_is_refused() -> None:
    """One rank row per page and an odd width: the second layer is not where the kernels, as compiled, may read."""
    rig = Rig(group_of(33, (33,)), [8], torch.bfloat16)
    rig.a, rig.b, rig.scale = (t[:, :9].clone() for t in (rig.a, rig.b, rig.scale))
    with pytest.raises(ValueError, match=r"g: layers of .* are not aligned"):
        rig.kernels(VARIANTS["triton-decode-1x8"], layout_of((2,)))
