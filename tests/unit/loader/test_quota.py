"""A tenant's bytes of a day: spent at once, back evenly, and nobody else's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.loader.config import AdmissionConfig
from services.loader.quota import DAY_S, ByteQuota


def test_a_day_of_bytes_may_be_spent_at_once_and_comes_back_evenly() -> None:
    quota = ByteQuota(1000)
    assert quota.charge("acme", 600, now=0) == quota.charge("acme", 400, now=0) == 0
    assert quota.charge("acme", 100, now=0) == DAY_S / 10
    assert quota.charge("globex", 1000, now=0) == 0
    assert quota.charge("acme", 100, now=DAY_S / 10 - 1) == pytest.approx(1)
    assert quota.charge("acme", 100, now=DAY_S / 10) == 0
    assert quota.charge("acme", 1000, now=2 * DAY_S) == 0


def test_without_a_limit_nothing_is_counted() -> None:
    quota = ByteQuota(0)
    assert quota.charge("acme", 1 << 60, now=0) == 0
    assert not quota._spent


def test_the_books_hold_only_who_owes() -> None:
    quota = ByteQuota(1000)
    for number in range(100):
        quota.charge(f"t{number}", 1, now=number * DAY_S)
    assert set(quota._spent) == {"t99"}


@given(st.lists(st.tuples(st.floats(0, DAY_S), st.integers(1, 1000)), max_size=40))
def test_no_window_of_a_day_has_more_than_two_days_bytes(steps: list[tuple[float, int]]) -> None:
    """A full budget and what comes back while it is spent: never more, however the charges fall."""
    quota, now, taken = ByteQuota(1000), 0.0, []
    for pause, size in steps:
        now += pause
        wait = quota.charge("acme", size, now=now)
        if not wait:
            taken.append((now, size))
        else:
            assert quota.charge("acme", size, now=now + wait + 1e-3) == 0
            now += wait + 1e-3
            taken.append((now, size))
    for start, _ in taken:
        assert sum(size for at, size in taken if start <= at < start + DAY_S) <= 2000 + 1


def test_settings_that_make_no_sense() -> None:
    for wrong in ({"max_update_norm": -1.0}, {"tenant_bytes_per_day": -1}):
        with pytest.raises(ValueError, match="negative"):
            AdmissionConfig(**wrong)
