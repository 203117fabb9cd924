"""What counts is chosen by what the host took, never by the value found."""

import itertools
from collections.abc import Callable

import pytest

from bench import host
from bench.host import Quiet, stolen

Machine = Callable[[list[int]], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes each following measurement take 1,000 ticks, of which so many were stolen."""

    def follow(thefts: list[int]) -> None:
        readings, total, taken = [], 0, 0
        for theft in thefts:
            readings.append((total, 0, 0, 0, 0, 0, 0, taken))
            total, taken = total + 1000 - theft, taken + theft
            readings.append((total, 0, 0, 0, 0, 0, 0, taken))
        following = iter(readings)
        monkeypatch.setattr(host, "cpu_times", lambda: next(following))

    return follow


def measured(quiet: Quiet, values: list[float]) -> tuple[float, int]:
    left = iter(values)
    found = quiet.measure(lambda: next(left))
    return found, len(values) - len(list(left))


def test_a_quiet_measurement_is_made_once(machine: Machine) -> None:
    machine([10])
    quiet = Quiet(spare_s=100, most=0.01, clock=itertools.count(0, 5).__next__)
    assert measured(quiet, [7.0, 1.0]) == (7.0, 1)
    assert quiet.said().startswith("median 1.0%, most 1.0% of 1 measurements, 0 made again; 0 count although")


def test_a_loud_one_is_made_again_until_it_is_quiet_and_a_worse_value_counts_then(machine: Machine) -> None:
    machine([200, 50, 0])
    assert measured(Quiet(spare_s=100, most=0.01, clock=itertools.count(0, 5).__next__), [1.0, 2.0, 9.0]) == (9.0, 3)


def test_when_the_spare_time_is_used_up_the_one_that_lost_least_counts(machine: Machine) -> None:
    machine([200, 300, 100, 0])
    quiet = Quiet(spare_s=10, most=0.01, clock=itertools.count(0, 5).__next__)
    assert measured(quiet, [1.0, 2.0, 9.0, 4.0]) == (9.0, 3)
    machine([500])
    assert measured(quiet, [3.0, 1.0]) == (3.0, 1)
    assert quiet.said() == (
        "median 50.0%, most 50.0% of 2 measurements, 2 made again; 2 count although more than 1% was taken"
    )


def test_where_nothing_is_known_nothing_was_stolen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stolen((), ()) == 0.0
    assert stolen((1,) * 8, (1,) * 8) == 0.0
    monkeypatch.setattr(host, "cpu_times", tuple)
    assert measured(Quiet(spare_s=100, most=0.0, clock=itertools.count(0, 5).__next__), [1.0, 2.0]) == (1.0, 1)


def test_this_kernels_reading_is_one_of_eight_kinds() -> None:
    assert len(host.cpu_times()) in {0, 8}
