"""What the router decides and charges, without servers: members, locality, popularity, dispatch."""

from services.router.dispatch import Dispatch
from services.router.fair_queue import FairQueue, Waiting
from services.router.ledger import Ledger
from services.router.locality import Locality
from services.router.members import Members, Shape
from services.router.popularity import Popularity
from services.router.prices import PriceBook, Prices
from services.router.shared_work import SharedWork
from services.shared.residency import Notice, Resident


def notice(*residents: Resident, epoch: int = 1, pool: int = 40) -> Notice:
    return Notice("e0", "b", epoch, 1, 0, 0, 0, 0, pool, residents)


class Desk:
    """A dispatch over executors that serve."""

    def __init__(self, *names: str, window: int = 8) -> None:
        self.members = Members(dict.fromkeys(names or ("e0",), "tiny"), window=window)
        self.ledger = Ledger()
        queue = FairQueue(self.ledger, max_queued=100, max_running=100, residence_s=30)
        prices = PriceBook(Prices(prefill=1.0, row=2.0, load=100.0))
        self.dispatch = Dispatch(queue, self.members, self.ledger, prices, Locality(block_tokens=10))
        for name in names or ("e0",):
            self.members.answered(name, notice(), Shape(64, 1000, 8, 10))
            self.members.set_fault(name, "")
        self.number = 0

    def offer(self, tenant: str = "acme", revision: str = "r", **facts: object) -> None:
        self.number += 1
        fields = {"rank": 8, "prompt_tokens": 50, "priority": 0, "arrived": 0.0, **facts}
        self.dispatch.offer(
            Waiting(id=str(self.number), tenant=tenant, base_model="tiny", revision_id=revision, **fields)
        )


def test_a_load_is_charged_when_decided_and_corrected_when_known() -> None:
    desk = Desk()
    desk.offer()
    grant = desk.dispatch.next(0.0)
    assert desk.ledger.accounts["acme"].load == 100.0
    grant.begun(40.0, 20, now=1.0)
    grant.decoded(3, now=1.0)
    account = desk.ledger.accounts["acme"]
    assert (account.load, account.prefill, account.decode) == (40.0, 30.0, 6.0)
    assert account.paid_ahead == 60.0 + 20.0 - 6.0
    assert "nobody else waited" in grant.story.text()
    assert "load 100 ms" in grant.story.text()


def test_who_joins_a_load_does_not_pay_for_it() -> None:
    desk = Desk()
    desk.offer("acme")
    desk.offer("globex")
    first, second = desk.dispatch.next(0.0), desk.dispatch.next(0.0)
    assert (first.story.cold, second.story.cold) == (True, False)
    first.begun(80.0, 0, now=1.0)
    second.begun(80.0, 0, now=1.0)
    assert {t: a.load for t, a in desk.ledger.accounts.items()} == {"acme": 80.0, "globex": 0.0}


def test_a_revision_that_has_just_served_is_known_before_the_next_report() -> None:
    desk = Desk()
    desk.offer()
    grant = desk.dispatch.next(0.0)
    grant.begun(40.0, 0, now=0.0)
    grant.release()
    desk.offer()
    assert not desk.dispatch.next(0.0).story.cold
    desk.members.answered("e0", notice(epoch=2), Shape(64, 1000, 8, 10))
    assert not desk.members.executor("e0").resident


def test_a_grant_gives_back_everything_once() -> None:
    desk = Desk()
    desk.offer()
    grant = desk.dispatch.next(0.0)
    view = desk.members.executor("e0")
    assert (view.in_flight, dict(view.held), dict(view.ahead), dict(view.loading)) == (
        1, {"acme": 1}, {"acme": (50,)}, {"r": "acme"},
    )  # fmt: skip
    grant.release()
    grant.release()
    grant.begun(1.0, 0, now=0.0)
    view = desk.members.executor("e0")
    assert (view.in_flight, dict(view.held), dict(view.ahead), dict(view.loading)) == (0, {}, {}, {})


def test_an_ended_rollout_has_no_account_and_nothing_that_was_charged_is_lost() -> None:
    desk = Desk()
    rollout = "tenants/acme/adapters/bot/rollouts/r1"
    desk.offer(rollout)
    grant = desk.dispatch.next(0.0)
    charged = desk.ledger.accounts[rollout].work
    desk.dispatch.close_accounts(set())
    assert rollout in desk.ledger.accounts, "its copy is under way"
    grant.release()
    desk.dispatch.close_accounts(set())
    assert rollout in desk.ledger.accounts, "who comes next is lifted to its counter"
    desk.offer("acme")
    desk.dispatch.next(0.0).release()
    desk.dispatch.close_accounts({rollout})
    assert rollout in desk.ledger.accounts, "it runs"
    desk.dispatch.close_accounts(set())
    assert list(desk.ledger.accounts) == ["acme"]
    assert desk.ledger.closed.work == charged > 0


def test_what_an_ended_rollout_was_charged_elsewhere_is_forgotten_and_counted_once_if_it_comes_again() -> None:
    ledger, rollout = Ledger(), "tenants/acme/adapters/bot/rollouts/r1"
    shared = SharedWork(ledger, router="here")
    for work in ({}, {rollout: 5.0, "acme": 1.0}, {rollout: 7.0, "acme": 1.0}, {"acme": 1.0}, {rollout: 2.0}):
        shared.hear({"there": work})
    assert ledger.accounts[rollout].elsewhere == 9.0
    assert shared._heard["there"] == {rollout: 2.0, "acme": 1.0}, "a tenant that is not told of may come again"


def test_a_tenant_takes_room_of_what_others_use_only_in_turns() -> None:
    desk = Desk()
    small = [Resident(f"v{n}", "READY", 10, 0) for n in range(4)]
    desk.members.answered("e0", notice(*small, pool=80), Shape(128, 99, 8, 10))
    for number in range(4):
        desk.offer(f"t{number}", f"v{number}", rank=8)
        desk.dispatch.next(0.0).release()
    # Four pages of eight are used by others: a load of five takes some of theirs, and is worth a fifth of the link.
    desk.offer("large", "x0", rank=40)
    desk.dispatch.next(1.0).release()
    desk.offer("large", "x1", rank=40)
    assert desk.dispatch.next(1.4) is None
    # Whoever needs no more than its part, or takes nobody's room, goes.
    desk.offer("other", "y", rank=8)
    admitted = desk.dispatch.next(1.4)
    assert admitted.request.tenant == "other"
    admitted.release()
    desk.dispatch.sweep(1.7)
    admitted = desk.dispatch.next(1.7)
    assert admitted.request.revision_id == "x1"
    admitted.release()
    # What nobody used for ten seconds is nobody's.
    for number in (2, 3):
        desk.offer("large", f"x{number}", rank=40)
        desk.dispatch.sweep(12.0)
        desk.dispatch.next(12.0).release()


def test_a_running_revision_gives_way_to_one_that_starves() -> None:
    desk = Desk()
    desk.members.answered("e0", notice(*(Resident(f"hot{n}", "READY", 10, 0) for n in range(4))), Shape(64, 99, 8, 10))
    for number in range(4):
        desk.offer("acme", f"hot{number}")
    grants = [desk.dispatch.next(0.0) for _ in range(4)]
    desk.offer("globex", "cold")
    assert desk.dispatch.next(0.5) is None
    desk.dispatch.sweep(0.75)
    assert not desk.members.executor("e0").draining
    desk.dispatch.next(1.0)
    desk.dispatch.sweep(1.1)
    (way,) = desk.members.executor("e0").draining
    desk.offer("acme", way)
    assert desk.dispatch.next(1.2) is None
    next(grant for grant in grants if grant.request.revision_id == way).release()
    admitted = desk.dispatch.next(1.3)
    assert (admitted.request.revision_id, admitted.story.cold) == ("cold", True)
    assert not desk.members.executor("e0").draining


def test_a_prompt_goes_where_its_beginning_is() -> None:
    desk = Desk("e0", "e1", "e2")
    for name in ("e0", "e1", "e2"):
        desk.members.answered(name, notice(Resident("r", "READY", 10, 0)), Shape(64, 1000, 8, 10))
    desk.offer(prefix=("x", "y"))
    grant = desk.dispatch.next(0.0)
    first = grant.executor
    grant.begun(0.0, 0, now=0.0)
    grant.decoded(1, now=0.0)
    grant.release()
    desk.offer(prefix=("x", "y", "z"))
    second = desk.dispatch.next(0.0)
    assert second.executor == first
    assert second.story.prefill_ms == 30.0
    desk.dispatch.locality.lost(first)
    assert desk.dispatch.locality.match(("x", "y")) == {}


def test_locality_forgets_what_was_used_least_recently() -> None:
    known = Locality(block_tokens=10, max_known=3)
    known.sent("e0", ("a", "b"))
    known.sent("e1", ("c",))
    known.match(("a",))
    known.sent("e1", ("a", "d"))
    assert known.match(("b",)) == {}
    assert known.match(("a", "d")) == {"e0": 10, "e1": 20}


def test_more_homes_come_after_two_hot_windows_and_go_after_a_cold_minute() -> None:
    popular = Popularity(most=3)
    seen = []
    for second in range(100):
        if second < 22:
            popular.worked("r", 900.0 if second < 12 else 1900.0, float(second))
        seen.append(popular.replicas("r", float(second)))
    assert seen[9] == 1
    assert seen[10] == 2
    assert seen[25] == 3
    assert seen[80] == 3
    assert popular.replicas("r", 90.0) == 2
    assert popular.replicas("r", 400.0) == 1
    assert popular.replicas("unknown", 0.0) == 1
