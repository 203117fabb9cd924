"""Laws of a rollout, under every order of evidence, time and hands."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.registry.rollout import arms
from services.registry.rollout import settings as choices
from services.registry.rollout.arms import ArmStats, StepStats
from services.registry.rollout.control import Action, control
from services.registry.rollout.machine import LOST, Evidence, Executor, Move, Position, Probe, decide
from services.registry.rollout.sequences import Grouped, Moments
from services.registry.rollout.settings import WHOLE, Gates, Prompt, Settings
from services.registry.rollout.states import ENDED, INITIAL, TABLE, Event, State
from services.registry.store import rollouts
from services.shared.errors import LoraportError

FAST = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
SETTINGS = st.builds(
    Settings,
    steps=st.sampled_from([(100, 500, 2500, 5000, WHOLE), (WHOLE,), (5000, WHOLE)]),
    min_samples=st.sampled_from([0, 20, 200]),
    min_step_s=st.just(10.0),
    retention_s=st.just(60.0),
    quorum=st.integers(0, 3),
    shadow=st.sampled_from([0, 100]),
    until_us=st.sampled_from([0, 0, 90_000_000]),
    golden=st.sampled_from([(), (Prompt("hello"),)]),
    gates=st.just(Gates(max_samples=1000)),
)


def arm(count: int, *, ms: float, errors: int = 0, tokens: float = 50.0) -> ArmStats:
    good = count - errors
    times = Grouped(Moments(good, ms, 0.04 * max(0, good - 1)))
    lengths = Grouped(Moments(good, tokens, 0.1 * max(0, good - 1)))
    return ArmStats(requests=count, errors=errors, first_token=times, per_token=replace(times), length=lengths)


ARM = st.builds(
    arm,
    st.integers(0, 1200),
    ms=st.sampled_from([3.0, 3.02, 3.5]),
    tokens=st.sampled_from([3.9, 5.5]),
)
STEP = st.builds(lambda new, control, old: StepStats({"new": new, "control": control, "old": old}), ARM, ARM, ARM)
EXECUTOR = st.builds(
    Executor,
    name=st.sampled_from("abc"),
    ready=st.booleans(),
    failure=st.sampled_from(["", "PIN_BUDGET", "DIGEST_MISMATCH", "LOADER_UNAVAILABLE"]),
    probe=st.none()
    | st.builds(
        Probe,
        mean_difference=st.sampled_from([0.0, 0.5, float("nan")]),
        max_difference=st.just(0.1),
        failure=st.sampled_from(["", "OVERLOADED"]),
    ),
)
EVIDENCE = st.builds(
    Evidence,
    executors=st.lists(EXECUTOR, unique_by=lambda item: item.name).map(tuple),
    serving=st.sets(st.sampled_from("abc")).map(frozenset),
    steps=st.dictionaries(st.integers(-1, 4), STEP),
    lost=st.sampled_from([(), (), (), ("a",), ("a", "b")]),
)
HANDS = st.none() | st.tuples(st.sampled_from(Action), st.sampled_from(["", "because"]))
WALK = st.lists(st.tuples(EVIDENCE, st.integers(0, 120), HANDS), max_size=14)

TO_JUDGE = [
    Position(state=State.PAUSED if held else state, held=state if held else None, entered_us=0)
    for state in (State.PRELOADING, State.PROBING, State.SHADOWING, State.SPLITTING, State.RETAINING)
    for held in (False, True)
    if (state, held) != (State.RETAINING, True)
]


def walk(
    settings: Settings, steps: list[tuple[Evidence, int, tuple[Action, str] | None]]
) -> list[tuple[Position, Move]]:
    """Every move, with the position before it."""
    position, now, moves = Position(state=INITIAL, entered_us=0), 0, []
    for evidence, seconds, hands in steps:
        now += seconds * 1_000_000
        try:
            move = (
                control(position, settings, evidence, hands[0], reason=hands[1], now_us=now)
                if hands
                else decide(position, settings, evidence, now_us=now)
            )
        except LoraportError as error:
            if error.reason not in ("INVALID_STATE", "INVALID_REQUEST", "QUORUM_MISSING"):
                raise
            move = None
        if move is not None:
            moves.append((position, move))
            position = move.position
    return moves


@FAST
@given(SETTINGS, WALK)
def test_the_alias_moves_once_forth_and_at_most_once_back(settings: Settings, steps: list) -> None:
    pointing = [(move.event, move.pointing) for _, move in walk(settings, steps) if move.pointing]
    assert pointing in (
        [],
        [(Event.FLIP, "new")],
        [(Event.FLIP, "new"), (Event.ROLLBACK, "old")],
    )


@FAST
@given(SETTINGS, st.sampled_from(TO_JUDGE), EVIDENCE)
def test_what_nobody_waits_for_any_more_is_called_off_whatever_is_known(
    settings: Settings, position: Position, seen: Evidence
) -> None:
    waited = replace(settings, until_us=90_000_000)
    move = decide(position, waited, seen, now_us=90_000_000)
    if position.state is State.RETAINING:
        assert move == decide(position, replace(settings, until_us=0), seen, now_us=90_000_000), "the alias has moved"
    else:
        assert move is not None
        assert (move.event, move.pointing) == (Event.ABORT, "")
    assert decide(position, waited, seen, now_us=89_999_999) == decide(
        position, replace(settings, until_us=0), seen, now_us=89_999_999
    )


@FAST
@given(SETTINGS, WALK)
def test_the_share_grows_step_by_step_and_falls_only_to_nothing(settings: Settings, steps: list) -> None:
    for before, move in walk(settings, steps):
        old, new = before.share(settings), move.position.share(settings)
        if new < old:
            assert new == 0
            assert move.position.ended or move.position.hold_reason == LOST
        if new > old:
            shares = [0, *settings.steps]
            assert new == shares[shares.index(old) + 1]


@FAST
@given(SETTINGS, WALK)
def test_nothing_is_split_before_a_quorum_and_a_good_probe(settings: Settings, steps: list) -> None:
    moves = walk(settings, steps)
    by_hand = any(hands and hands[0] is Action.ADVANCE for _, _, hands in steps)
    if any(move.position.share(settings) for _, move in moves) and not by_hand:
        seen = [move.position.state for _, move in moves]
        assert (State.PROBING in seen) == settings.probes


@FAST
@given(SETTINGS, EVIDENCE, st.sampled_from([State.PRELOADING, State.PROBING]))
def test_what_lets_it_go_on_are_executors_that_serve(settings: Settings, seen: Evidence, state: State) -> None:
    move = decide(Position(state=state, entered_us=0), settings, seen, now_us=1)
    if move is None or move.event not in (Event.PROBE, Event.SHADOW, Event.SPLIT):
        return
    there = [item for item in seen.executors if item.name in seen.serving]
    if state is State.PRELOADING:
        good = [item for item in there if item.ready]
    else:
        good = [item for item in there if item.probe and not item.probe.failure and item.probe.mean_difference <= 0.02]
        assert all(item.probe is None or item.probe.failure or item.probe.mean_difference == 0 for item in there)
    assert len(good) >= (settings.quorum or max(1, len(seen.serving)))


@FAST
@given(SETTINGS, WALK)
def test_a_step_lasts_its_time_unless_somebody_says_otherwise(settings: Settings, steps: list) -> None:
    for before, move in walk(settings, steps):
        if move.event in (Event.STEP, Event.FLIP) and "by hand" not in move.sentence:
            assert move.position.entered_us - before.entered_us >= settings.min_step_s * 1e6


@FAST
@given(SETTINGS, WALK)
def test_an_end_is_final(settings: Settings, steps: list) -> None:
    moves = walk(settings, steps)
    assert all(not before.ended for before, _ in moves)
    for _, move in moves:
        assert move.position.ended == (move.position.state in ENDED)


@FAST
@given(SETTINGS, EVIDENCE, st.sampled_from(sorted(TABLE)), st.integers(0, 4))
def test_rollback_by_hand_is_always_possible_before_the_end(
    settings: Settings, evidence: Evidence, pair: tuple[State, Event], step: int
) -> None:
    state = pair[0]
    held = State.SPLITTING if state is State.PAUSED else None
    position = Position(state=state, held=held, step=min(step, len(settings.steps) - 1), entered_us=0)
    move = control(position, settings, evidence, Action.ROLLBACK, reason="because", now_us=1)
    assert move is not None
    assert move.position.state is State.ROLLED_BACK
    assert move.position.share(settings) == 0
    assert move.pointing == ("old" if state is State.RETAINING else "")


@FAST
@given(SETTINGS, EVIDENCE, WALK)
def test_a_decision_is_the_same_after_a_restart(settings: Settings, evidence: Evidence, steps: list) -> None:
    """What the database keeps of position, settings and sums is all that a decision is made of."""

    def kept(value: object) -> dict:
        return json.loads(json.dumps(value))

    read = choices.from_json(kept(choices.to_json(settings)), kept(choices.prompts_to_json(settings)))
    sums = {
        index: StepStats({arm: arms.from_json(kept(arms.to_json(stats))) for arm, stats in step.arms.items()})
        for index, step in evidence.steps.items()
    }
    positions = [Position(state=State.SPLITTING, entered_us=0), *(move.position for _, move in walk(settings, steps))]
    for position in positions:
        again = rollouts._position(kept(rollouts._position_json(position)))
        assert again == position
        for now in (position.entered_us, position.entered_us + 700_000_000):
            moved = decide(again, read, replace(evidence, steps=sums), now_us=now)
            assert moved == decide(position, settings, evidence, now_us=now)


def test_every_state_can_be_reached() -> None:
    reached = {INITIAL}
    for _ in State:
        reached |= {to for (state, _), to in TABLE.items() if state in reached}
    assert reached == set(State)


@pytest.mark.parametrize("state", sorted(ENDED))
def test_nothing_leads_out_of_an_end(state: State) -> None:
    assert not [pair for pair in TABLE if pair[0] is state]


def test_a_good_step_waits_for_its_time() -> None:
    good = StepStats({"new": arm(2000, ms=3.0), "control": arm(2000, ms=3.0)})
    position, seen = Position(state=State.SPLITTING, entered_us=0), Evidence(steps={0: good})
    assert decide(position, Settings(), seen, now_us=59_000_000) is None
    move = decide(position, Settings(), seen, now_us=61_000_000)
    assert move is not None
    assert (move.event, move.position.step) == (Event.STEP, 1)


def test_an_executor_that_has_gone_makes_no_quorum() -> None:
    there = (Executor(name="a", ready=True), Executor(name="b", ready=True))
    position = Position(state=INITIAL, entered_us=0)
    gone = Evidence(executors=there, serving=frozenset("bc"))
    assert decide(position, Settings(), gone, now_us=1) is None
    back = Evidence(executors=there, serving=frozenset("ab"))
    assert decide(position, Settings(), back, now_us=1) is not None


def test_a_probe_of_one_that_has_gone_does_not_stand_for_one_that_has_come() -> None:
    seen = Evidence(
        executors=(Executor(name="a", ready=True, probe=Probe()), Executor(name="b", ready=True)),
        serving=frozenset("b"),
    )
    position = Position(state=State.PROBING, entered_us=0)
    assert decide(position, Settings(), seen, now_us=1) is None
    move = decide(position, Settings(), replace(seen, serving=frozenset("a")), now_us=1)
    assert move is not None
    assert move.event is Event.SPLIT


def test_failures_of_those_that_have_gone_say_nothing() -> None:
    broken = tuple(Executor(name=name, failure="DIGEST_MISMATCH") for name in "ab")
    full = (Executor(name="a", failure="PIN_BUDGET"),)
    position = Position(state=INITIAL, entered_us=0)
    for executors, event in ((broken, Event.ROLLBACK), (full, Event.HOLD)):
        assert decide(position, Settings(), Evidence(executors=executors, serving=frozenset("cd")), now_us=1) is None
        move = decide(position, Settings(), Evidence(executors=executors, serving=frozenset("ab")), now_us=1)
        assert move is not None
        assert move.event is event


def test_a_missing_probe_holds_until_it_has_come() -> None:
    seen = Evidence(executors=(Executor(name="a", ready=True),), serving=frozenset("a"))
    position = Position(state=State.PROBING, entered_us=0)
    held = decide(position, Settings(), seen, now_us=601_000_000)
    assert held is not None
    assert (held.position.state, held.position.hold_reason) == (State.PAUSED, "PROBE_MISSING")
    assert decide(held.position, Settings(), seen, now_us=10**10) is None
    come = replace(seen, executors=(Executor(name="a", ready=True, probe=Probe()),))
    back = decide(held.position, Settings(), come, now_us=10**10)
    assert back is not None
    assert (back.event, back.position.at) == (Event.RESUME, State.PROBING)
    on = decide(back.position, Settings(), come, now_us=10**10)
    assert on is not None
    assert on.event is Event.SPLIT


def test_a_first_loss_takes_the_share_back_and_a_second_one_rolls_back() -> None:
    there = (Executor(name="a", ready=True), Executor(name="b", ready=True))
    gone = Evidence(executors=(Executor(name="a"), there[1]), serving=frozenset("ab"), lost=("a",))
    chosen = Settings()
    position = Position(state=State.SPLITTING, step=3, entered_us=0)
    held = decide(position, chosen, gone, now_us=1)
    assert held is not None
    assert (held.position.hold_reason, held.position.share(chosen)) == (LOST, 0)
    # It waits for what was lost to come back with the new revision, and at least the time of a step.
    assert decide(held.position, chosen, gone, now_us=61_000_000) is None
    back = replace(gone, executors=there)
    assert decide(held.position, chosen, back, now_us=59_000_000) is None
    again = decide(held.position, chosen, back, now_us=61_000_000)
    assert again is not None
    assert (again.position.state, again.position.share(chosen)) == (State.SPLITTING, chosen.steps[0])
    # One that never comes back is not waited for without end.
    assert decide(held.position, chosen, replace(gone, serving=frozenset("b")), now_us=601_000_000) is not None
    # Known and tried again, it is no reason any more; the next one is, wherever the rollout is.
    assert decide(again.position, chosen, back, now_us=61_000_001) is None
    for state, pointing in (
        (State.PRELOADING, ""),
        (State.PROBING, ""),
        (State.SPLITTING, ""),
        (State.RETAINING, "old"),
    ):
        at = replace(again.position, state=state)
        end = decide(at, chosen, replace(back, lost=("a", "a")), now_us=61_000_002)
        assert end is not None
        assert (end.position.state, end.pointing) == (State.ROLLED_BACK, pointing)
        assert "2 times an executor went away" in end.sentence


def test_a_loss_does_not_end_a_hold_by_hand_and_counts_after_it() -> None:
    seen = Evidence(executors=(Executor(name="a", ready=True),), serving=frozenset("a"), lost=("a",))
    held = Position(state=State.PAUSED, held=State.SPLITTING, hold_reason="BY_HAND", step=2, entered_us=0)
    assert decide(held, Settings(), seen, now_us=10**9) is None
    on = control(held, Settings(), seen, Action.RESUME, reason="", now_us=10**9)
    assert on is not None
    move = decide(on.position, Settings(), seen, now_us=10**9)
    assert move is not None
    assert move.position.hold_reason == LOST
