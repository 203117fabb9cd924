"""The whole product of ranks, rows, widths and variants against the float64 twin, interpreted in lanes (`lanes.py`).

96 segments are one launch, poisoned as in `test_triton_interpreted.py`. That lanes give the interpreter's own bits is held
there; that mistakes are noticed in them, in `test_source_mutations.py`.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from services.executor.kernels import triton_decode, triton_prefill
from services.executor.kernels.layout import RowLayout
from services.executor.kernels.variants import VARIANTS
from tests.kernels.lanes import in_lanes
from tests.kernels.triton_rig import DIMS, RANKS, ROWS, Case, Rig, assert_same, whole_product

pytestmark = pytest.mark.usefixtures("interpreter")


@cache
def answered(segments: tuple[tuple[int, int], ...], dim: int) -> tuple[Rig, RowLayout, tuple[torch.Tensor, ...]]:
    """Return y, x and the twin's y; the variants of a width share them."""
    case = next(case for case in whole_product() if (case.segments, case.dim) == (segments, dim))
    rig, layout = case.rig()
    y, x = rig.inputs(layout)
    return rig, layout, (y, x, rig.expected(y, x, layout, 1))


def test_every_rank_meets_every_number_of_rows_at_every_width_on_every_variant() -> None:
    met = {(case.variant, case.dim, *segment) for case in whole_product() for segment in case.segments}
    wanted = {(v, dim, rank, rows) for v in VARIANTS for dim in DIMS for rank in RANKS for rows in ROWS}
    assert len(wanted) == 2880
    left_out = wanted - met
    assert len(left_out) == 140
    assert all("decode" in v and rank > 8 and (rows == 127 or v.endswith("1x8")) for v, _, rank, rows in left_out)


@pytest.mark.parametrize("case", whole_product(), ids=str)
def test_the_kernels_equal_the_twin(case: Case) -> None:
    rig, layout, (y, x, expected) = answered(case.segments, case.dim)
    with in_lanes(triton_decode, triton_prefill) as lanes:
        got = rig.run(VARIANTS[case.variant], y, x, layout, 1, lanes=lanes)
    assert_same(got, expected)
    assert torch.equal(got[-2:], y[-2:])  # the adapter without rank in this group
