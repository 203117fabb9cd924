"""Refused calls are kept up to a bound, and what is left out is counted."""

from services.registry.refusals import MAX_CALLERS, OTHERS, PER_WINDOW, WINDOW_S, Refusal, Refusals


def refusal(principal: str = "router") -> Refusal:
    return Refusal(principal=principal, method="/m", reason="NOT_ALLOWED", request_id="r")


def test_each_caller_has_its_share_a_minute() -> None:
    refusals = Refusals()
    kept = [refusals.note(refusal(), now=float(second)) for second in range(PER_WINDOW + 5)]
    assert kept == [[refusal()]] * PER_WINDOW + [[]] * 5
    assert refusals.note(refusal("loader"), now=20.0) == [refusal("loader")]
    assert refusals.expire(now=WINDOW_S - 1) == []
    count = Refusal(principal="router", method="", reason="5 more refused calls", request_id="")
    assert refusals.note(refusal(), now=WINDOW_S) == [count, refusal()]
    assert refusals.expire(now=None) == []


def test_callers_without_end_share_one_window() -> None:
    refusals = Refusals()
    for number in range(MAX_CALLERS):
        refusals.note(refusal(f"caller-{number}"), now=0.0)
    kept = [refusals.note(refusal(f"more-{number}"), now=1.0) for number in range(PER_WINDOW + 3)]
    assert sum(map(len, kept)) == PER_WINDOW
    assert [(item.principal, item.reason) for item in refusals.expire(now=None)] == [(OTHERS, "3 more refused calls")]
