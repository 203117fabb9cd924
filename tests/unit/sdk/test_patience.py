"""When a client asks again, and when it does not."""

import pytest

from loraport import LoraportError, UnavailableError
from loraport.errors import ResourceExhaustedError
from loraport.patience import FIRST_DELAY_S, LAST_DELAY_S, Patience

AWAY = UnavailableError("cannot reach it", reason="UNREACHABLE")


def test_it_asks_again_ever_more_slowly_until_its_patience_ends() -> None:
    tries, now, delays = Patience(10.0, 60.0, now=0.0), 0.0, []
    while (delay := tries.after(AWAY, begun=False, now=now)) is not None:
        delays.append(delay)
        now += delay
    assert delays[0] == FIRST_DELAY_S
    assert max(delays) == LAST_DELAY_S
    assert delays == sorted(delays)
    assert 10.0 - LAST_DELAY_S <= now < 10.0


def test_without_patience_the_first_failure_is_the_last() -> None:
    assert Patience(0.0, 60.0, now=0.0).after(AWAY, begun=False, now=0.0) is None


def test_what_has_begun_is_never_asked_again() -> None:
    assert Patience(10.0, 60.0, now=0.0).after(AWAY, begun=True, now=0.0) is None


@pytest.mark.parametrize("error", [LoraportError("x", reason="X"), ResourceExhaustedError("x", reason="QUOTA")])
def test_only_what_is_away_comes_back(error: LoraportError) -> None:
    assert Patience(10.0, 60.0, now=0.0).after(error, begun=False, now=0.0) is None


def test_the_timeout_is_one_for_all_tries() -> None:
    tries = Patience(100.0, 3.0, now=0.0)
    assert tries.left(0.0) == 3.0
    assert tries.left(2.5) == 0.5
    assert tries.left(9.0) == 0.0
    assert tries.after(AWAY, begun=False, now=2.9) is None
    assert Patience(100.0, None, now=0.0).left(50.0) is None


def test_a_delay_that_the_service_asks_for_is_kept() -> None:
    wait = UnavailableError("busy", reason="OVERLOADED", retry_after=1.5)
    assert Patience(10.0, None, now=0.0).after(wait, begun=False, now=0.0) == 1.5
