"""The working set is the distinct revisions of a window, and their bytes."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.working_set import WINDOW_S, WorkingSet

ASKED = st.lists(st.tuples(st.integers(0, 5), st.floats(0, WINDOW_S)), max_size=40)


@given(ASKED)
def test_it_equals_counting_the_window(asked: list[tuple[int, float]]) -> None:
    found, now, history = WorkingSet(), 0.0, []
    for key, pause in asked:
        now += pause
        found.asked(f"r{key}", 10 * (key + 1), now)
        history.append((key, now))
        live = {key for key, at in history if at >= now - WINDOW_S}
        assert found.size(now) == (len(live), sum(10 * (key + 1) for key in live))
    assert found.size(now + WINDOW_S + 1) == (0, 0)
