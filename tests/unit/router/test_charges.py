"""What a tenant pays for, and what an executor has to compute still, is the executor's word, not the router's guess."""

from dataclasses import replace

import pytest

from services.router.answers import Answers
from services.router.capacity import MAX_KNOWN, PoolNeeds
from services.router.detokenize import TokenTable
from services.router.events import ExecutorTokens
from services.router.fair_queue import FairQueue, Waiting
from services.router.ledger import Ledger
from services.router.members import Shape
from services.router.validate import Sampling
from services.shared.residency import Resident
from tests.unit.router.test_dispatch import Desk, notice

LONG = tuple(f"block {number}" for number in range(200))  # of 10 tokens each


@pytest.fixture
def desk() -> Desk:
    """One executor that has the revision; its prompts cost a millisecond a token."""
    desk = Desk()
    desk.members.answered("e0", notice(Resident("r", "READY", 10, 0)), Shape(64, 10_000, 8, 10))
    return desk


def ahead(desk: Desk) -> tuple[int, ...]:
    return desk.members.executor("e0").ahead.get("acme", ())


def ask(desk: Desk) -> None:
    desk.offer(prompt_tokens=2000, prefix=LONG)


def test_a_prompt_that_the_executor_has_forgotten_is_paid_for_and_waited_for(desk: Desk) -> None:
    ask(desk)
    first = desk.dispatch.next(0.0)
    first.begun(0.0, 0, now=0.0)
    first.decoded(1, now=0.0)
    first.release()
    ask(desk)
    second = desk.dispatch.next(0.0)
    assert (second.story.prefill_ms, ahead(desk)) == (0.0, ())
    second.begun(0.0, 0, now=0.0)
    assert (desk.ledger.accounts["acme"].prefill, ahead(desk)) == (4000.0, (2000,))
    # From now on the guess is doubted: what is ahead there holds the tenant back, until the executor says otherwise.
    ask(desk)
    assert desk.dispatch.next(0.0) is None
    second.decoded(1, now=0.0)
    third = desk.dispatch.next(0.0)
    assert (third.story.prefill_ms, ahead(desk)) == (2000.0, (2000,))
    third.begun(0.0, 1995, now=0.0)
    assert (desk.ledger.accounts["acme"].prefill, ahead(desk)) == (4005.0, (5,))
    third.decoded(1, now=0.0)
    third.release()
    ask(desk)
    assert desk.dispatch.next(0.0).story.prefill_ms == 0.0


def test_what_was_sent_and_never_computed_is_not_taken_for_there(desk: Desk) -> None:
    ask(desk)
    desk.dispatch.next(0.0).release()
    ask(desk)
    again = desk.dispatch.next(0.0)
    assert again.story.prefill_ms == 2000.0
    again.begun(0.0, 700, now=0.0)
    again.release()
    assert desk.dispatch.locality.match(LONG) == {"e0": 700}


def test_an_answer_that_a_stop_string_ends_says_what_was_cached() -> None:
    answers = Answers(TokenTable({0: b"a", 1: b"b"}), Sampling(stop=("b",)), prompt_tokens=9, cached_tokens=8)
    *_, finished = answers.take(ExecutorTokens(0, (0, 1)))
    assert (finished.stop_match, finished.usage.cached_tokens) == ("b", 8)


def test_a_moved_request_pays_for_the_load_that_it_causes_where_it_goes() -> None:
    desk = Desk("e0", "e1")
    desk.offer("globex", only="e0")
    other = desk.dispatch.next(0.0)
    desk.offer("acme", only="e0")
    joined = desk.dispatch.next(0.0)
    joined.request = replace(joined.request, only="")
    assert desk.ledger.accounts["acme"].load == 0.0
    assert desk.dispatch.move(joined, frozenset({"e0"}), now=0.0)
    assert desk.ledger.accounts["acme"].load == 100.0
    joined.begun(80.0, 0, now=1.0)
    assert desk.ledger.accounts["acme"].load == 80.0
    other.release()


def test_the_load_that_a_moved_request_caused_first_stays_charged() -> None:
    desk = Desk("e0", "e1")
    desk.members.answered("e1", notice(Resident("r", "READY", 10, 0)), Shape(64, 1000, 8, 10))
    desk.offer(only="e0")
    grant = desk.dispatch.next(0.0)
    grant.request = replace(grant.request, only="")
    assert desk.dispatch.move(grant, frozenset({"e0"}), now=0.0)
    grant.begun(0.0, 0, now=1.0)
    assert desk.ledger.accounts["acme"].load == 100.0


def test_a_request_that_goes_back_to_the_queue_pays_for_its_prompt_once(desk: Desk) -> None:
    ask(desk)
    grant = desk.dispatch.next(0.0)
    grant.uncharge()
    grant.release()
    desk.dispatch.offer(replace(grant.request, arrived=1.0))
    again = desk.dispatch.next(1.0)
    assert (desk.ledger.accounts["acme"].prefill, ahead(desk)) == (2000.0, (2000,))
    assert desk.ledger.accounts["acme"].paid_ahead == 0.0
    again.release()


def test_a_queue_keeps_nothing_of_requests_that_have_left_it() -> None:
    queue = FairQueue(Ledger(), max_queued=1000, max_running=1000, residence_s=30)
    requests = [
        Waiting(id=str(n), tenant="t", base_model="tiny", revision_id="r", rank=8, prompt_tokens=1, priority=0,
                arrived=float(n))
        for n in range(100)
    ]  # fmt: skip
    for request in requests:
        queue.offer(request)
    for request in requests[1:]:
        queue.withdraw(request)
    assert [request for _, request in queue._waiting.values()] == requests[:1]
    assert queue.expire(29.0) == []
    assert queue.expire(30.0) == requests[:1]


def test_what_is_known_of_pools_is_bounded_and_making_room_is_rare() -> None:
    needs = PoolNeeds()
    looks = 0
    forget = needs._forget

    def count(now: float) -> None:
        nonlocal looks
        looks += 1
        forget(now)

    needs._forget = count
    for number in range(MAX_KNOWN + 3000):
        needs.used("e0", f"r{number}", tenant="t", pages=1, cold=False, now=number * 1e-3)
        assert len(needs._uses) <= MAX_KNOWN
    assert looks <= 2
    assert f"r{MAX_KNOWN + 2999}" in needs.need("e0", 23.0).revisions
