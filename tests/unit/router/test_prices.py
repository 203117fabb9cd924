"""Prices of work are learned from what executors report."""

import random

import pytest

from services.router.prices import PriceBook, Prices, StepTotals

PRIOR = Prices(prefill=1.0, row=2.0)


def totals(steps: int, busy_ms: float, prefill: int, rows: int, context: int = 0, mib: float = 0.0) -> StepTotals:
    return StepTotals(
        steps=steps, busy_ms=busy_ms, prefill_tokens=prefill, decode_rows=rows, context_tokens=context, adapter_mib=mib
    )


def test_prices_are_found_again() -> None:
    draw, book, sums = random.Random(1), PriceBook(PRIOR), [0.0] * 6
    for _ in range(200):
        steps, prefill, rows = 50, draw.randrange(5000), draw.randrange(50, 1500)
        context, mib = rows * draw.randrange(100, 4000), steps * draw.randrange(500.0)
        busy = 8 * steps + 0.03 * prefill + 0.1 * rows + 0.0002 * context + 0.01 * mib
        sums = [old + new for old, new in zip(sums, (steps, busy, prefill, rows, context, mib), strict=True)]
        book.observe("e0", "tiny", epoch=1, totals=totals(*sums))
    found = book.of("tiny")
    assert found.prefill == pytest.approx(0.03, rel=0.1)
    assert found.context == pytest.approx(0.0002, rel=0.1)
    assert found.adapter == pytest.approx(0.01, rel=0.2)
    # A row pays its part of the step's fixed 8 ms: about 50 steps for 775 rows.
    assert found.row == pytest.approx(0.1 + 8 * 50 / 775, rel=0.2)
    assert book.of("large") == PRIOR


def test_missed_and_late_reports_cost_nothing_and_a_restart_begins_anew() -> None:
    book = PriceBook(PRIOR)
    for epoch, steps in ((1, 100), (1, 1000), (1, 900), (2, 10), (2, 1000)):
        book.observe("e0", "tiny", epoch=epoch, totals=totals(steps, steps * 10.0, steps * 20, 0))
    assert book.of("tiny").prefill < 1.0
    assert min(book.of("tiny").prefill, book.of("tiny").row) > 0


def test_nonsense_makes_nothing_free() -> None:
    book = PriceBook(PRIOR)
    for steps in range(1, 100):
        book.observe("e0", "tiny", epoch=1, totals=totals(steps * 100, 0.0, steps * 10_000, steps * 10_000))
    assert book.of("tiny").prefill >= PRIOR.prefill / 1000
    assert book.of("tiny").row >= PRIOR.row / 1000
    book.observe("e0", "tiny", epoch=1, totals=totals(10**6, -5.0, -1, 0))
    assert book.of("tiny").prefill > 0


def test_loads_are_fixed_and_by_size() -> None:
    book = PriceBook(PRIOR)
    for mib in (10.0, 40.0, 160.0) * 50:
        book.observe_load("tiny", mib=mib, ms=20 + 2 * mib)
    assert book.of("tiny").load_ms(100.0) == pytest.approx(220, rel=0.05)


def test_an_adapter_is_shared_by_the_rows_that_read_it() -> None:
    prices = Prices(row=1.0, adapter=0.5)
    assert prices.decode_ms(tokens=2, context=0, adapter_mib=10, sharing=5) == 2 * (1.0 + 1.0)
