"""Any sequence of events on a load: what it took is given back exactly once."""

from hypothesis import given
from hypothesis import strategies as st

from services.loader.stages import Act, Broke, Ended, LoadLife, LoadState, Spoiled

EVENTS = st.lists(st.sampled_from(["ended", "broke", "spoiled", "join", "leave", "cancel"]), max_size=25)


@given(EVENTS)
def test_a_load_ends_once(events: list[str]) -> None:
    """The shell reports one end for every RUN it was told, and never any other."""
    life = LoadLife(cause="test")
    life.join("a")
    running, waiting, acts = True, 1, []
    for event in events:
        was_final = life.final
        before = len(acts)
        if event == "spoiled" and running and life.state in (LoadState.VERIFY, LoadState.CANCELLED):
            acts.extend(life.handle(Spoiled(1.0)))
            running = Act.RUN in acts[before:]
        if event in ("ended", "broke") and running:
            acts.extend(life.handle(Ended(1.0) if event == "ended" else Broke("INTERNAL")))
            running = Act.RUN in acts[before:]
        elif event == "join" and not was_final:
            life.join("a")
            waiting += 1
        elif event == "leave" and waiting:
            waiting -= 1
            acts.extend(life.leave("a"))
        elif event == "cancel":
            acts.extend(life.cancel("a") or ())
        assert life.waiter_count == waiting
        assert was_final <= life.final
    assert acts.count(Act.PUBLISH) + acts.count(Act.DISCARD) <= 1
    assert acts.count(Act.UNPIN) <= acts.count(Act.PUBLISH) == (life.state is LoadState.READY)
    assert (Act.DISCARD in acts) == (life.state in (LoadState.FAILED, LoadState.CANCELLED) and not running)
    assert (Act.STOP in acts) == (life.state is LoadState.CANCELLED)
