"""The work list covers every pair of row and rank once, nothing else, and fits the buffers that were made for it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.kernels.layout import make_layout
from services.executor.kernels.work import RECORD, GroupShape, Work, WorkLimits, make_work, traffic

PAGE = 8
steps = st.tuples(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 3, 8, 9, 24, 63, 64])), max_size=6),
    st.sampled_from([(1, 8), (4, 8), (16, 16), (64, 64)]),
)


def work_of(base: int, segments: list[tuple[int, int]], blocks: tuple[int, int]) -> Work:
    layout = make_layout([None, *range(len(segments))], [base, *(rows for rows, _ in segments)])
    first = iter(range(1000, 10**6))
    pages = [[next(first) for _ in range(-(-rank // PAGE))] for _, rank in segments]
    ranks = [rank for _, rank in segments]
    return make_work(layout, ranks=ranks, pages=pages, rows_per_page=PAGE, block_rows=blocks[0], block_ranks=blocks[1])


def records(flat: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [flat[i : i + RECORD] for i in range(0, len(flat), RECORD)]


@given(steps)
def test_every_pair_of_row_and_rank_is_covered_once(step: tuple[int, list[tuple[int, int]], tuple[int, int]]) -> None:
    base, segments, blocks = step
    work = work_of(base, segments, blocks)
    wanted: Counter[tuple[int, int, int]] = Counter()
    scratch, row = [], base
    listed = 0
    for rows, rank in segments:
        for r in range(row, row + rows):
            for k in range(rank):
                wanted[r, k, 1000 + listed + k // PAGE] += 1
                scratch.append(len(scratch))
        row += rows
        listed += -(-rank // PAGE)
    got: Counter[tuple[int, int, int]] = Counter()
    places = []
    for row0, rows, first, all_rows, rank, k0, pages, h_base in records(work.shrink):
        for r in range(row0, row0 + rows):
            for k in range(k0, min(rank, k0 + blocks[1])):
                got[r, k, work.pages[pages + k // PAGE]] += 1
                places.append(h_base + (r - first) * rank + k)
        assert first <= row0
        assert row0 + rows <= first + all_rows
    assert got == wanted
    assert sorted(places) == scratch
    assert work.scratch == len(scratch)
    expanded = Counter(r for row0, rows, *_ in records(work.expand) for r in range(row0, row0 + rows))
    assert set(expanded.values()) <= {1}
    assert set(expanded) == {r for r, _, _ in wanted}


@given(steps)
def test_the_buffers_hold_every_step_within_the_limits(
    step: tuple[int, list[tuple[int, int]], tuple[int, int]],
) -> None:
    base, segments, blocks = step
    work = work_of(base, segments, blocks)
    rows = max(1, base + sum(r for r, _ in segments))
    limits = WorkLimits(
        rows=rows,
        adapters=max(1, len(segments)),
        rank=max((rank for _, rank in segments), default=1) or 1,
        pages=max(1, len(work.pages)),
    )
    room = limits.capacity(rows_per_page=PAGE, block_rows=blocks[0], block_ranks=blocks[1])
    assert work.shrink_count <= room[0]
    assert work.expand_count <= room[1]
    assert len(work.pages) <= room[2]
    assert work.scratch <= limits.rows * limits.rank


def test_pages_that_do_not_hold_the_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        make_work(make_layout([0], [1]), ranks=[17], pages=[[0, 1]], rows_per_page=8, block_rows=1, block_ranks=8)


def test_traffic_is_the_arithmetic_of_the_docstrings() -> None:
    """Llama-7B, seven modules, rank 16: 80 MB per distinct adapter and step (0.6 % of the base)."""
    shapes = [
        GroupShape(4096, (4096, 4096, 4096), 32),
        GroupShape(4096, (4096,), 32),
        GroupShape(4096, (11008, 11008), 32),
        GroupShape(11008, (4096,), 32),
    ]
    layout = make_layout([None, 0, 1], [3, 1, 1])
    one = [traffic(layout, ranks=[16, 0], shape=s, element_bytes=2, block_rows=1) for s in shapes]
    activations = sum(2 * s.layers * (s.in_features + 2 * sum(s.out_features)) for s in shapes)
    assert sum(t.compulsory_bytes for t in one) - activations == 78_080 * 16 * 32 * 2
    assert sum(t.flops for t in one) == 2 * 78_080 * 16 * 32
    assert sum(t.repeated_bytes for t in one) == 0
    twice = traffic(make_layout([0], [5]), ranks=[16], shape=shapes[1], element_bytes=2, block_rows=2)
    assert twice.repeated_bytes == 2 * 16 * 8192 * 2 * 32
