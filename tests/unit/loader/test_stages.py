"""The two tables: every pair of state and event has one answer, and the invariants of the module hold."""

import itertools

import pytest

from services.loader.stages import (
    INTAKE_FINAL,
    INTAKE_MOVES,
    LOAD_FINAL,
    LOAD_MOVES,
    Abandoned,
    Act,
    Broke,
    Ended,
    IllegalMove,
    IntakeLife,
    IntakeState,
    LoadLife,
    LoadState,
    Refused,
    Report,
    Spoiled,
)

EVENTS = (Ended(1.0, 5), Refused(1.0, 5), Spoiled(1.0, 5), Broke("INTERNAL"), Abandoned())


def load_in(state: LoadState) -> LoadLife:
    life = LoadLife(cause="test")
    life.state = state
    return life


def test_a_load_that_goes_well() -> None:
    life = LoadLife(cause="sha256:1 for executor-0")
    life.join("executor-0")
    acts = [life.handle(Ended(float(i), i)) for i in range(4)]
    assert acts == [(Act.RUN,), (Act.RUN,), (Act.RUN,), (Act.PUBLISH,)]
    assert life.state is LoadState.READY
    assert life.final
    assert life.reports == [
        Report("RESOLVE", 0.0, 0), Report("FETCH", 1.0, 1), Report("VERIFY", 2.0, 2), Report("STAGE_HOST", 3.0, 3)
    ]  # fmt: skip
    assert life.leave("executor-0") == (Act.UNPIN,)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LoadState, EVENTS)))
def test_load_table(state: LoadState, event: object) -> None:
    life = load_in(state)
    if (state, type(event)) not in LOAD_MOVES:
        with pytest.raises(IllegalMove, match="begins in"):
            life.handle(event)
        assert life.state is state
        return
    acts = life.handle(event)
    # 1: a stage is asked for exactly when the new state has one to run.
    assert (Act.RUN in acts) == (life.state not in LOAD_FINAL)
    # 2: bytes become visible only on the way into READY.
    assert (Act.PUBLISH in acts) == (life.state is LoadState.READY and state is not LoadState.READY)
    # What was final stays what it was.
    assert state not in LOAD_FINAL or life.state is state


@pytest.mark.parametrize("stage", [LoadState.RESOLVE, LoadState.FETCH, LoadState.VERIFY, LoadState.STAGE_HOST])
def test_failure_and_abandonment_give_back_exactly_once(stage: LoadState) -> None:
    failed = load_in(stage)
    failed.join("a")
    acts = list(failed.handle(Broke("STORE_UNAVAILABLE"))) + list(failed.leave("a"))
    assert acts == [Act.DISCARD]
    for late in (Ended(1.0), Broke("LOAD_CANCELLED")):
        dropped = load_in(stage)
        dropped.join("a")
        acts = [*dropped.leave("a"), *dropped.handle(late)]
        assert acts == [Act.STOP, Act.DISCARD]
        assert dropped.state is LoadState.CANCELLED
        assert dropped.reports == []


def test_waiters_keep_a_load_alive() -> None:
    life = load_in(LoadState.FETCH)
    for holder in ("a", "a", "b"):
        life.join(holder)
    assert (life.waiter_count, life.others_than("a"), life.others_than("c")) == (3, 1, 3)
    assert life.cancel("a") is None
    assert life.leave("a") == ()
    assert life.leave("b") == ()
    assert life.cancel("a") == (Act.STOP,)
    # The caller whose load was cancelled leaves as well, to no effect; nobody leaves twice.
    assert life.leave("a") == ()
    with pytest.raises(IllegalMove):
        life.leave("a")
    assert life.cancel("a") is None


@pytest.mark.parametrize(("state", "event"), list(itertools.product(IntakeState, EVENTS)))
def test_intake_table(state: IntakeState, event: object) -> None:
    life = IntakeLife(cause="test")
    life.state = state
    if (state, type(event)) not in INTAKE_MOVES:
        with pytest.raises(IllegalMove):
            life.handle(event)
        return
    acts = life.handle(event)
    # 4: every way into a final state cleans, once, and no other does.
    assert (acts == (Act.CLEAN,)) == (life.state in INTAKE_FINAL)
    assert life.final == (life.state in INTAKE_FINAL)


def test_refused_bytes_are_reported_and_never_promoted() -> None:
    life = IntakeLife(cause="test")
    life.handle(Ended(1.0))
    life.handle(Refused(1.0))
    assert life.state is IntakeState.REPORT
    assert life.handle(Ended(1.0)) == (Act.CLEAN,)
    assert [report.stage for report in life.reports] == ["RECEIVE", "VERIFY", "REPORT"]
    assert "VERIFY → REPORT" in life.story()
