"""What takes an executor out of the fleet, and what of it counts as the loss of its process."""

from types import SimpleNamespace

import pytest

from services.router.fleet import REFUSED_TENANTS, Fleet
from services.router.members import Members, Shape
from services.shared.errors import LoraportError
from services.shared.residency import Notice

NOTICE = Notice("e0", "b", 7, 1, 0, queued_count=0, running_count=0, pool_used_bytes=0, pool_size_bytes=0, revisions=())


class Seen:
    """A fleet of one executor that serves, and what it told."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.answered: list[tuple[str, int, bool]] = []
        self.meanwhile = lambda: None
        self.word = "SERVING"
        self.silent = False
        members = Members({"e0": "tiny"}, window=4)
        members.answered("e0", NOTICE, Shape())
        members.set_fault("e0", "")
        self.fleet = Fleet(
            {"e0": self},
            members,
            board=SimpleNamespace(),
            base_id=lambda base_model: "b",
            prices=SimpleNamespace(observe=lambda *a, **k: None),
            interval_s=1.0,
            clock=SimpleNamespace(now=lambda: 0.0),
            on_lost=lambda name, epoch, on_board: self.lost.append(name),
            on_answered=lambda *told: self.answered.append(told),
        )

    async def state(self, timeout_s: float) -> SimpleNamespace:
        self.meanwhile()
        if self.silent:
            raise LoraportError("EXECUTOR_UNAVAILABLE")
        return SimpleNamespace(report=NOTICE, shape=Shape(), totals=None, state=self.word, base_id="b")

    @property
    def out(self) -> bool:
        return bool(self.fleet.members.fault("e0"))


@pytest.mark.parametrize(("why", "lost"), [("EXECUTOR_UNAVAILABLE", ["e0"]), ("DRAINING", []), ("INVALID_TICKET", [])])
def test_only_an_executor_that_is_gone_is_lost(why: str, lost: list[str]) -> None:
    seen = Seen()
    seen.fleet.note_failure("e0", why)
    assert seen.out
    assert seen.lost == lost


def test_one_tenants_tickets_are_no_evidence_and_several_tenants_in_a_row_are() -> None:
    seen = Seen()
    for _ in range(10):
        seen.fleet.note_ticket("e0", "acme", taken=False)
    for number in range(REFUSED_TENANTS - 2):
        seen.fleet.note_ticket("e0", f"t{number}", taken=False)
    assert not seen.out
    seen.fleet.note_ticket("e0", "acme", taken=True)
    for number in range(REFUSED_TENANTS):
        assert not seen.out
        seen.fleet.note_ticket("e0", f"t{number}", taken=False)
    assert seen.out
    assert not seen.lost


async def test_an_answer_from_before_it_went_away_says_nothing() -> None:
    seen = Seen()
    seen.meanwhile = lambda: seen.fleet.note_failure("e0", "EXECUTOR_UNAVAILABLE")
    await seen.fleet.poll_once("e0")
    assert (seen.lost, seen.answered) == (["e0"], [])
    seen.meanwhile = lambda: None
    await seen.fleet.poll_once("e0")
    assert seen.answered == [("e0", 7, False)]
    seen.word = "FAILED"
    for _ in range(2):
        await seen.fleet.poll_once("e0")
    assert seen.lost == ["e0", "e0"]
    assert seen.answered[-1] == ("e0", 7, True)


async def test_a_router_that_hears_nobody_knows_that() -> None:
    seen = Seen()
    assert seen.fleet.answering
    seen.silent = True
    await seen.fleet.poll_once("e0")
    assert not seen.fleet.answering
