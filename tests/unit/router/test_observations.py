"""What is told to the registry: everything once, in order, bounded; what clients say, only of their own answers."""

import asyncio
import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router import observations
from services.router.door import Job
from services.router.events import ExecutorScored, Started, Tokens, Usage
from services.router.observations import AnswersGiven, Outbox, Outboxes, repetition
from services.router.observing import Observer
from services.router.probing import ProbeResult, probe
from services.router.rollout_split import Side
from services.shared.clock import ManualClock
from services.shared.errors import LoraportError
from services.shared.split import Observation

SIDE = Side("r1", "new", 2)


def seen(number: int = 1) -> Observation:
    return Observation(arm="new", first_token_ms=float(number), per_token_ms=1.0, ok=True)


@given(st.lists(st.one_of(st.integers(0, 2), st.sampled_from(["report", "lose"])), max_size=60))
def test_every_observation_is_taken_exactly_once_and_in_its_step(moves: list[Any]) -> None:
    """A report that arrives but whose answer is lost is sent again under its number, and counts once."""
    outbox, taken, given_in = Outbox(), {}, []
    for number, move in enumerate([*moves, *["report"] * len(moves)], start=1):
        if isinstance(move, int):
            outbox.add(move, seen(number))
            given_in.append((move, float(number)))
        elif (batch := outbox.next()) is not None:
            taken.setdefault(batch.sequence, batch)
            assert taken[batch.sequence] == batch
            if move == "report":
                outbox.taken(batch.sequence)
    assert sorted(taken) == list(range(1, len(taken) + 1))
    told = [(b.step, o.first_token_ms) for b in taken.values() for o in b.observations]
    assert sorted(told) == sorted(given_in)


def test_a_full_outbox_drops_and_counts_and_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "MAX_KEPT", 5)
    monkeypatch.setattr(observations, "MAX_BATCH", 2)
    outbox = Outbox()
    for _ in range(7):
        outbox.add(0, seen())
    outbox.outcome(0, "new", accepted=True)
    assert outbox.dropped == 2
    sizes, outcomes = [], 0
    while (batch := outbox.next()) is not None:
        sizes.append(len(batch.observations))
        outcomes += sum(batch.outcomes.values())
        outbox.taken(batch.sequence)
    assert (sizes, outcomes) == ([2, 2, 1], 1)
    outbox.add(0, seen())
    assert outbox.next() is not None, "there is room again"


def test_a_rollout_that_has_ended_has_no_outbox() -> None:
    boxes = Outboxes()
    boxes.of("r1").add(0, seen())
    boxes.of("r2").add(0, seen())
    assert list(boxes.running(["r2"])) == ["r2"]
    assert boxes.of("r1").next() is None


def test_a_rollout_may_get_its_outbox_while_the_others_are_told() -> None:
    boxes = Outboxes()
    boxes.of("r1")
    told = boxes.running(["r1", "r2"])
    for _ in told:
        boxes.of("r2").add(0, seen())
    assert list(boxes.running(["r1", "r2"])) == ["r1", "r2"]


def test_repetition_is_the_share_of_repeated_fours() -> None:
    assert repetition([1, 2, 3] * 2) == 0.0
    assert repetition(list(range(20))) == 0.0
    assert repetition([7] * 23) == pytest.approx(0.95)


def test_answers_are_remembered_for_their_tenant_for_a_while_and_not_without_bound() -> None:
    answers = AnswersGiven(most=2, life_s=10.0)
    answers.given("acme", "a", SIDE, now=0.0)
    assert answers.judged("globex", "a", now=1.0) == (False, None)
    assert answers.judged("acme", "a", now=1.0) == (True, SIDE)
    assert answers.judged("acme", "a", now=1.0) == (True, None)
    assert answers.judged("acme", "a", now=10.1) == (False, None)
    for name in "bcd":
        answers.given("acme", name, None, now=2.0)
    assert answers.judged("acme", "b", now=2.0) == (False, None)
    assert answers.judged("acme", "d", now=2.0) == (True, None)


def ended_early(error: BaseException, *, begun: bool, patience_s: float | None = None) -> bool:
    """Returns whether a request without a token that ended by `error` is observed."""
    observer = Observer(clock=ManualClock())
    job = Job(
        id="q", tenant="acme", weight=1.0, base=None, revision=None, prompt_token_ids=(1,), sampling=None, side=SIDE,
        first_token_timeout_s=patience_s,
    )  # type: ignore[arg-type]  # fmt: skip
    started = Started(
        revision_id="new", base_id="b", executor="e", queue_ms=0, load_ms=0.0, prompt_token_ids=(1,), version=1
    )
    with contextlib.suppress(type(error)), observer.watch(job, timeout_s=9.0) as observed:
        if begun:
            observed.saw(started)
        raise error
    return observer.outboxes.of("r1").next() is not None


def test_a_deadline_that_nobody_meets_decides_about_nothing() -> None:
    late, broken = LoraportError("DEADLINE_EXCEEDED"), LoraportError("NON_FINITE_LOGITS")
    assert not ended_early(late, begun=False)
    assert not ended_early(late, begun=True, patience_s=1e-9)
    assert ended_early(late, begun=True)
    assert ended_early(broken, begun=True, patience_s=1e-9)


def watched(error: BaseException | None = None, *, wait_s: float = 0.0, timeout_s: float | None = None) -> Any:
    """Returns what the outbox has after a request of two tokens, half a second apart, that ended by `error`."""
    clock = ManualClock()
    observer = Observer(clock=clock)
    job = Job(
        id="q", tenant="acme", weight=1.0, base=None, revision=None, prompt_token_ids=(1,), sampling=None, side=SIDE
    )  # type: ignore[arg-type]
    try:
        with observer.watch(job, timeout_s=timeout_s) as observed:
            clock.advance(0.25)
            observed.saw(
                Started(
                    revision_id="new",
                    base_id="b",
                    executor="e",
                    queue_ms=0,
                    load_ms=3.0,
                    prompt_token_ids=(1,),
                    version=1,
                )
            )
            observed.saw(Tokens(0, (5,), "a"))
            observed.saw(Tokens(1, (6, 6, 6), "of another answer"))
            clock.advance(0.5)
            observed.saw(Tokens(0, (5,), "b"))
            clock.advance(wait_s)
            if error is not None:
                raise error
    except BaseException as raised:
        if raised is not error:
            raise
    batch = observer.outboxes.of("r1").next()
    return None if batch is None else batch.observations[0]


def test_times_and_tokens_are_those_of_the_first_answer() -> None:
    found = watched()
    assert (found.first_token_ms, found.per_token_ms, found.output_tokens) == (250.0, 500.0, 2)
    assert (found.ok, found.error_reason, found.cold) == (True, "", True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LoraportError("NON_FINITE_LOGITS"), "NON_FINITE_LOGITS"),
        (LoraportError("DEADLINE_EXCEEDED"), "DEADLINE_EXCEEDED"),
        (RuntimeError("a bug"), "INTERNAL"),
        (LoraportError("OVERLOADED"), None),
        (LoraportError("EXECUTOR_UNAVAILABLE"), None),
        (LoraportError("INVALID_CREDENTIAL"), None),
        (asyncio.CancelledError(), None),
        (GeneratorExit(), None),
    ],
)
def test_what_is_the_callers_doing_says_nothing_of_a_revision(error: BaseException, reason: str | None) -> None:
    found = watched(error, timeout_s=60.0)
    assert (found and found.error_reason) == reason
    assert found is None or not found.ok


def test_a_caller_that_waited_to_its_deadline_has_waited_for_the_revision() -> None:
    assert watched(asyncio.CancelledError(), wait_s=9.3, timeout_s=10.0).error_reason == "DEADLINE_EXCEEDED"


def scored(chosen: list[float], reference: list[float]) -> ExecutorScored:
    return ExecutorScored(
        logprobs=(), revision_id="", base_id="", load_ms=0, kernel_path="", usage=Usage(1, 0),
        chosen=tuple(chosen), reference=tuple(reference),
    )  # fmt: skip


def run_probe(answer: Any, golden: list[tuple[int, ...]], evaluated: list[tuple[int, ...]] = []) -> ProbeResult:  # noqa: B006
    async def score(revision: str, prompt: Any, continuation: Any, both: bool) -> ExecutorScored:
        return answer(revision, list(continuation), both)

    return asyncio.run(probe(score, old="old", new="new", golden=golden, evaluated=evaluated))


def test_a_probe_compares_token_by_token_and_perplexity_with_the_old_revision() -> None:
    def answer(revision: str, tokens: list[int], both: bool) -> ExecutorScored:
        assert revision == "new" or not both
        chosen = [-1.0 if revision == "old" else -2.0] * len(tokens)
        return scored(chosen, [-2.0 + 0.1 * (t == 9) for t in tokens] if both else [])

    result = run_probe(answer, [(1, 2, 9), (1, 3), (4,)], [(1, 2, 3), (5, 6)])
    assert (result.prompts, result.tokens, result.nonfinite) == (2, 3, False)
    assert result.mean_difference == pytest.approx(0.1 / 3)
    assert result.max_difference == pytest.approx(0.1)
    assert result.to_perplexity == pytest.approx(math.e**2)
    assert result.from_perplexity == pytest.approx(math.e)


def test_what_is_not_a_number_is_a_result_and_what_cannot_be_said_is_an_error() -> None:
    assert run_probe(lambda *_: scored([math.nan], [-1.0]), [(1, 2)]).nonfinite
    assert run_probe(lambda *_: scored([-1.0], [math.inf]), [(1, 2)]).nonfinite

    def fails(reason: str) -> Any:
        def answer(*_: Any) -> ExecutorScored:
            raise LoraportError(reason)

        return answer

    assert run_probe(fails("NON_FINITE_LOGITS"), [(1, 2)]).nonfinite
    for answer, reason in ((fails("STORE_UNAVAILABLE"), "STORE_UNAVAILABLE"), (lambda *_: scored([], []), "INTERNAL")):
        with pytest.raises(LoraportError) as caught:
            run_probe(answer, [(1, 2)])
        assert caught.value.reason == reason
