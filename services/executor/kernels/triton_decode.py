"""Shrink and expand for few rows per adapter: one pass over the pages, vector products, no tensor cores.

Both kernels walk a list of work records (`work.py`) with a fixed grid: program p takes units p, p + programs, ...
up to a count that is read from memory. So one launch, or one captured graph, serves every number of adapters and ranks;
nothing is launched for an adapter that is not there, and no unit exists for a rank that an adapter does not have.

Specialization: everything in capitals is a compile-time constant of the model's shape and of the variant; integers are
never specialized by value; pointers are 16-byte aligned (the launcher checks). Importing this needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink_decode(
    x, a, pages, records, counts, h,
    IN: tl.constexpr, SUBS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Partial sums of x @ A.T over one slice of the input features per unit.

    Semantics: for each record and sub s, split p, row r, rank k of the record:
        h[s, r, k, p] = sum over columns c of slice p of x[r, c] * A[pool_row(k), s, c]
    Shapes: x [rows, IN]; a [pool rows, SUBS, IN], same dtype; pages int32; records int32 [n, 8]; counts int32 [>= 1],
        counts[0] records; h float32, per segment [SUBS, rows, rank, SPLITS]. Every element that a record covers is
        written exactly once; nothing else is touched. Sums in float32.
    Bytes: sum over records of ranks * SUBS * IN * e for A, read once per ROWS rows, + rows * SUBS * IN * e for x per
        chunk of RANKS (from cache after the first) + rows * ranks * SUBS * SPLITS * 4 written.
    FLOPs: 2 * rows * ranks * SUBS * IN.
    """
    SPAN: tl.constexpr = (IN + SPLITS * COLS - 1) // (SPLITS * COLS) * COLS
    units = tl.load(counts) * (SUBS * SPLITS)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        record = records + unit // (SUBS * SPLITS) * 8
        sub = unit // SPLITS % SUBS
        split = unit % SPLITS
        row0 = tl.load(record)
        rows = tl.load(record + 1)
        first = tl.load(record + 2)
        all_rows = tl.load(record + 3)
        rank = tl.load(record + 4)
        k = tl.load(record + 5) + tl.arange(0, RANKS)
        page_start = tl.load(record + 6)
        h_base = tl.load(record + 7)
        own = k < rank
        page = tl.load(pages + page_start + k // PAGE, mask=own, other=0)
        pool_row = page.to(tl.int64) * PAGE + k % PAGE
        r = tl.arange(0, ROWS)
        real = r < rows
        a_rows = a + (pool_row * SUBS + sub) * IN
        x_rows = x + (row0 + r).to(tl.int64) * IN
        total = tl.zeros((ROWS, RANKS, COLS), tl.float32)
        for step in range(0, SPAN, COLS):
            c = split * SPAN + step + tl.arange(0, COLS)
            wide = c < IN
            at = tl.load(a_rows[:, None] + c[None, :], mask=own[:, None] & wide[None, :], other=0.0)
            xt = tl.load(x_rows[:, None] + c[None, :], mask=real[:, None] & wide[None, :], other=0.0)
            total += xt.to(tl.float32)[:, None, :] * at.to(tl.float32)[None, :, :]
        out = h_base * SUBS + (sub * all_rows + row0 - first + r)[:, None] * rank + k[None, :]
        tl.store(h + out * SPLITS + split, tl.sum(total, axis=2), mask=real[:, None] & own[None, :])


@triton.jit
def expand_decode(
    y, b, scale, pages, records, counts, h,
    OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr, SUBS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Scale the shrunk rows, expand them and add them to y, one block of output columns per unit.

    Semantics: for each record, sub s and row r:
        y[r, first(s) + c] += sum over k of g[k] * B[pool_row(k), first(s) + c]
        with g[k] = scale[pool_row(k), s] * sum over p of h[s, r, k, p]
    Shapes: y [rows, ALL], ALL = OUT0 + OUT1 + OUT2 (absent subs: 0), first(s) the widths before s; b [pool rows, ALL],
        same dtype; scale float32 [pool rows, SUBS]; h from `shrink_decode`; counts int32 [>= 2], counts[1] records.
    In place on y, rounded once; rows without a record are neither read nor written. Sums in float32.
    Bytes: sum over records of rank * ALL * e for B, read once per ROWS rows, + 2 * rows * ALL * e for y
        + rows * rank * SUBS * SPLITS * 4 for h per block of columns (from cache after the first).
    FLOPs: 2 * rows * rank * ALL.
    """
    BLOCKS0: tl.constexpr = (OUT0 + COLS - 1) // COLS
    BLOCKS1: tl.constexpr = (OUT1 + COLS - 1) // COLS
    BLOCKS2: tl.constexpr = (OUT2 + COLS - 1) // COLS
    BLOCKS: tl.constexpr = BLOCKS0 + BLOCKS1 + BLOCKS2
    ALL: tl.constexpr = OUT0 + OUT1 + OUT2
    units = tl.load(counts + 1) * BLOCKS
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        record = records + unit // BLOCKS * 8
        block = unit % BLOCKS
        sub = (block >= BLOCKS0).to(tl.int32) + (block >= BLOCKS0 + BLOCKS1).to(tl.int32)
        width = tl.where(sub == 0, OUT0, tl.where(sub == 1, OUT1, OUT2))
        before = tl.where(sub == 0, 0, tl.where(sub == 1, OUT0, OUT0 + OUT1))
        block -= tl.where(sub == 0, 0, tl.where(sub == 1, BLOCKS0, BLOCKS0 + BLOCKS1))
        row0 = tl.load(record)
        rows = tl.load(record + 1)
        first = tl.load(record + 2)
        all_rows = tl.load(record + 3)
        rank = tl.load(record + 4)
        page_start = tl.load(record + 6)
        h_base = tl.load(record + 7)
        r = tl.arange(0, ROWS)
        real = r < rows
        c = block * COLS + tl.arange(0, COLS)
        wide = c < width
        h_rows = h + (h_base * SUBS + (sub * all_rows + row0 - first + r) * rank) * SPLITS
        total = tl.zeros((ROWS, COLS), tl.float32)
        for k0 in range(0, rank, RANKS):
            k = k0 + tl.arange(0, RANKS)
            own = k < rank
            page = tl.load(pages + page_start + k // PAGE, mask=own, other=0)
            pool_row = page.to(tl.int64) * PAGE + k % PAGE
            parts = (h_rows[:, None] + k[None, :] * SPLITS)[:, :, None] + tl.arange(0, SPLITS)[None, None, :]
            small = tl.sum(tl.load(parts, mask=(real[:, None] & own[None, :])[:, :, None], other=0.0), axis=2)
            small *= tl.load(scale + pool_row * SUBS + sub, mask=own, other=0.0)[None, :]
            b_at = b + pool_row[:, None] * ALL + before + c[None, :]
            bt = tl.load(b_at, mask=own[:, None] & wide[None, :], other=0.0)
            total += tl.sum(small[:, :, None] * bt.to(tl.float32)[None, :, :], axis=1)
        y_at = y + (row0 + r).to(tl.int64)[:, None] * ALL + before + c[None, :]
        seen = real[:, None] & wide[None, :]
        tl.store(y_at, (tl.load(y_at, mask=seen, other=0.0).to(tl.float32) + total).to(y.dtype.element_ty), mask=seen)
