"""Shrink and expand for many rows per adapter: tensor-core tiles over gathered rank rows.

Records, persistent grid and specialization as in `triton_decode.py`. `UPCAST` makes the products' operands float32:
only for Triton's interpreter, which multiplies the bit patterns of bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink_prefill(
    x, a, pages, records, counts, h,
    IN: tl.constexpr, SUBS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Partial sums of x @ A.T, one tile of ROWS x RANKS over one slice of the input features per unit.

    Semantics, shapes, dtypes and what is written: as `shrink_decode`.
    Bytes: per tile, ranks * IN * e for A and rows * IN * e for x (both from cache when a neighbour read them), and
        rows * ranks * SPLITS * 4 written. FLOPs: 2 * ROWS * RANKS * IN per tile on tensor cores, of which
        2 * rows * ranks * IN are useful.
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
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for step in range(0, SPAN, COLS):
            c = split * SPAN + step + tl.arange(0, COLS)
            wide = c < IN
            xt = tl.load(x_rows[:, None] + c[None, :], mask=real[:, None] & wide[None, :], other=0.0)
            at = tl.load(a_rows[None, :] + c[:, None], mask=own[None, :] & wide[:, None], other=0.0)
            if UPCAST:
                total += tl.dot(xt.to(tl.float32), at.to(tl.float32), input_precision="ieee")
            else:
                total += tl.dot(xt, at, input_precision="ieee")
        out = h_base * SUBS + (sub * all_rows + row0 - first + r)[:, None] * rank + k[None, :]
        tl.store(h + out * SPLITS + split, total, mask=real[:, None] & own[None, :])


@triton.jit
def expand_prefill(
    y, b, scale, pages, records, counts, h,
    OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr, SUBS: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Expand the shrunk rows on tensor cores, scale them and add them to y, one tile of ROWS x COLS per unit.

    Semantics, shapes, in place: as `expand_decode`, for a scale that all rank rows of an adapter share (the first one's
    is taken): h is rounded to y's dtype before the product and scaled after it, so that a large scale takes nothing of
    float16's range. Sums are float32.
    Bytes: per tile, rank * COLS * e for B, rows * rank * SPLITS * 4 for h, 2 * rows * COLS * e for y.
    FLOPs: 2 * ROWS * rank (rounded up to RANKS) * COLS per tile, of which 2 * rows * rank * COLS are useful.
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
            b_at = b + pool_row[:, None] * ALL + before + c[None, :]
            bt = tl.load(b_at, mask=own[:, None] & wide[None, :], other=0.0)
            if UPCAST:
                small = small.to(bt.dtype).to(tl.float32)
                total += tl.dot(small, bt.to(tl.float32), input_precision="ieee")
            else:
                total += tl.dot(small.to(bt.dtype), bt, input_precision="ieee")
        total *= tl.load(scale + tl.load(pages + page_start).to(tl.int64) * PAGE * SUBS + sub)
        y_at = y + (row0 + r).to(tl.int64)[:, None] * ALL + before + c[None, :]
        seen = real[:, None] & wide[None, :]
        tl.store(y_at, (tl.load(y_at, mask=seen, other=0.0).to(tl.float32) + total).to(y.dtype.element_ty), mask=seen)
