from dataclasses import replace

from services.router.fair_queue import FairQueue, Waiting
from services.router.fleet_view import MAX_AHEAD, ExecutorView, FleetView, newer
from services.router.ledger import Ledger
from services.router.placement import Wish, choose, order, place, too_large
from services.router.prices import Prices
from services.shared.residency import Notice, Resident

REVISION = "sha256:" + "a" * 64
WISH = Wish("tiny", REVISION, rank=8)


def executor(name: str, **changes: object) -> ExecutorView:
    fields: dict = {
        "name": name, "base_model": "tiny", "serving": True, "why_not": "", "in_flight": 0, "window": 4, "resident": {},
        "expected": frozenset(), "max_rank": 64,
    }  # fmt: skip
    return ExecutorView(**{**fields, **changes})


def holding(state: str = "READY") -> dict[str, Resident]:
    return {REVISION: Resident(REVISION, state, 1, 0)}


def chosen(*executors: ExecutorView, wish: Wish = WISH) -> str:
    return choose(FleetView(executors), wish).executor


def test_resident_first_then_least_in_flight_then_the_better_home() -> None:
    assert chosen(executor("a"), executor("b", resident=holding(), in_flight=3)) == "b"
    assert chosen(executor("a", in_flight=1), executor("b")) == "b"
    assert chosen(executor("b"), executor("a")) == order(REVISION, ("b", "a"))[0]


def test_a_load_under_way_is_joined_rather_than_begun_again() -> None:
    assert chosen(executor("a"), executor("b", expected=frozenset({REVISION}), in_flight=2)) == "b"
    assert chosen(executor("a"), executor("b", resident=holding("LOADING"), in_flight=1)) == "b"
    assert chosen(executor("a", resident=holding()), executor("b", resident=holding("LOADING"))) == "a"


def test_what_may_not_be_chosen_says_why() -> None:
    decision = choose(
        FleetView(
            (
                executor("full", in_flight=4),
                executor("out", serving=False, why_not="does not answer"),
                executor("small", max_rank=4),
                executor("tried"),
                executor("other", base_model="large"),
            )
        ),
        Wish("tiny", REVISION, 8, frozenset({"tried"})),
    )
    assert decision.executor == ""
    reasons = {candidate.executor: candidate.reasons[0] for candidate in decision.candidates}
    assert reasons == {
        "full": "has its 4 requests",
        "out": "does not answer",
        "small": "holds ranks up to 4, the revision has 8",
        "tried": "failed this request before",
    }


def test_the_base_model_needs_no_load() -> None:
    decision = choose(FleetView((executor("a"),)), Wish("tiny", "", 0))
    assert (decision.executor, decision.candidates[0].cost_ms) == ("a", 0.0)


def test_too_large_is_only_said_of_executors_that_serve() -> None:
    small, away = executor("a", max_rank=4), executor("b", serving=False)
    assert too_large(FleetView((small, away)), "tiny", 8)
    assert not too_large(FleetView((away,)), "tiny", 8)
    assert not too_large(FleetView((small, executor("c"))), "tiny", 8)


def test_the_roomiest_serving_executor_decides_the_context() -> None:
    fleet = FleetView(
        (executor("a", max_context=32), executor("b", max_context=64), executor("c", max_context=99, serving=False))
    )
    assert fleet.context_tokens("tiny", 128) == 64
    assert fleet.context_tokens("tiny", 48) == 48
    assert FleetView(()).context_tokens("tiny", 48) == 48


def test_an_older_notice_never_replaces_a_newer_one() -> None:
    def notice(epoch: int, sequence: int) -> Notice:
        return Notice("a", "b", epoch, sequence, 0, 0, 0, 0, 0, ())

    assert newer(None, notice(1, 1)) == notice(1, 1)
    assert newer(notice(2, 1), notice(1, 9)) == notice(2, 1)
    assert newer(notice(1, 9), notice(2, 1)) == notice(2, 1)


PRICES = Prices(prefill=1.0, row=2.0, load=1000.0)
NAMES = ("a", "b", "c", "d")


def reasons(*executors: ExecutorView, wish: Wish = WISH) -> dict[str, str]:
    return {c.executor: c.reasons[0] for c in choose(FleetView(executors), wish).candidates}


def test_a_revision_that_nobody_has_goes_to_the_same_home_whoever_asks() -> None:
    home = order(REVISION, NAMES)[0]
    assert {chosen(*(executor(name) for name in names)) for names in (NAMES, NAMES[::-1])} == {home}
    # Another executor takes over only its own part.
    moved = sum(order(f"r{n}", NAMES)[0] != order(f"r{n}", (*NAMES, "e"))[0] for n in range(1000))
    assert 130 < moved < 280


def test_a_home_that_is_far_over_its_part_is_passed_over() -> None:
    first, second = order(REVISION, NAMES)[:2]
    busy = [executor(name, in_flight=20 if name == first else 0, window=32) for name in NAMES]
    assert chosen(*busy) == second


def test_the_beginning_of_a_prompt_draws_a_request_unless_it_costs_more_than_it_saves() -> None:
    wish = Wish("tiny", REVISION, 8, prompt_tokens=1000, matches={"b": 900})
    here = holding()
    assert place(FleetView((executor("a", resident=here), executor("b", resident=here))), wish, PRICES).executor == "b"
    far = executor("b", resident=here, ahead={"other": (2000,)})
    assert place(FleetView((executor("a", resident=here), far)), wish, PRICES).executor == "a"
    # Keys at an executor without the revision save less than its load costs.
    assert place(FleetView((executor("a", resident=here), executor("b"))), wish, PRICES).executor == "a"


def test_a_session_stays_unless_going_gains_more_than_a_fifth() -> None:
    wish = Wish("tiny", REVISION, 8, prompt_tokens=100, last="b")
    here = holding()

    def placed(ahead: int) -> str:
        fleet = FleetView((executor("a", resident=here), executor("b", resident=here, ahead={"x": (ahead,)})))
        return place(fleet, wish, PRICES).executor

    assert (placed(20), placed(40)) == ("b", "a")


def test_a_load_is_begun_elsewhere_only_for_more_than_half_its_time() -> None:
    wish = Wish("tiny", REVISION, 8, prompt_tokens=100)

    def placed(ahead: int) -> str:
        fleet = FleetView((executor("a"), executor("b", resident=holding(), ahead={"x": (ahead,)})))
        return place(fleet, wish, PRICES).executor

    assert (placed(1400), placed(1600)) == ("b", "a")


def test_at_most_two_loads_and_one_of_a_tenant_with_company() -> None:
    one = {"r1": "acme"}
    acme = Wish("tiny", REVISION, 8, tenant="acme")
    assert chosen(executor("a", loading=one), wish=acme) == "a"
    assert chosen(executor("a", loading=one, peaks={"acme": 1, "globex": 1}), wish=acme) == ""
    assert chosen(executor("a", loading={"r1": "globex"}, peaks={"acme": 1, "globex": 1}), wish=acme) == "a"
    assert chosen(executor("a", loading={**one, "r2": "globex"}), wish=acme) == ""
    assert chosen(executor("a", loading={**one, "r2": "globex"}, resident=holding()), wish=acme) == "a"


def test_a_load_needs_pages_that_are_free_or_idle() -> None:
    full = {"page_rows": 4, "page_count": 4, "free_pages": 1}
    assert chosen(executor("a", **full, idle_pages=1)) == "a"
    assert "all of it is in use" in reasons(executor("a", **full, idle_pages=0))["a"]
    assert chosen(executor("a", **full, idle_pages=0, resident=holding())) == "a"


def test_a_revision_that_gives_way_gets_nothing_more_there() -> None:
    gives_way = executor("a", resident=holding(), draining=frozenset({REVISION}))
    assert "starves" in reasons(gives_way)["a"]
    assert chosen(gives_way, executor("b")) == "b"


def test_places_are_kept_for_tenants_that_have_less_than_their_part() -> None:
    hog = Wish("tiny", REVISION, 8, tenant="hog")
    other = Wish("tiny", REVISION, 8, tenant="other")
    full = {"resident": holding(), "window": 8, "reserve": 2, "in_flight": 8, "held": {"hog": 8}}
    assert (chosen(executor("a", **full), wish=hog), chosen(executor("a", **full), wish=other)) == ("", "a")
    # What the other had of late is kept free, up to a quarter of all.
    late = {"resident": holding(), "window": 8, "in_flight": 6, "held": {"hog": 6}, "peaks": {"hog": 6, "other": 4}}
    assert (chosen(executor("a", **late), wish=hog), chosen(executor("a", **late), wish=other)) == ("", "a")
    late |= {"in_flight": 5, "held": {"hog": 5}}
    assert chosen(executor("a", **late), wish=hog) == "a"


def test_a_tenant_has_about_two_steps_of_prompt_tokens_ahead_whatever_others_have() -> None:
    wish = Wish("tiny", REVISION, 8, tenant="acme", prompt_tokens=2000)
    near = {"acme": (MAX_AHEAD - 24, 23), "b": (16_000,)}
    assert chosen(executor("a", resident=holding(), ahead=near), wish=wish) == "a"
    assert chosen(executor("a", resident=holding(), ahead={"acme": (MAX_AHEAD - 24, 24)}), wish=wish) == ""
    assert chosen(executor("a", resident=holding(), ahead={"globex": (9000,)}), wish=wish) == "a"


def test_what_is_to_be_computed_is_one_number_for_whoever_judges_and_whoever_counts() -> None:
    believed = Wish("tiny", REVISION, 8, tenant="acme", prompt_tokens=2000, matches={"a": 1500})
    doubted = replace(believed, doubted={"a"})
    free, full = (
        FleetView((executor("a", resident=holding(), ahead={"acme": (MAX_AHEAD - 24, more)}),)) for more in (23, 24)
    )
    assert place(full, doubted) is None
    for view, wish, tokens in ((full, believed, 500), (free, believed, 500), (free, doubted, 2000)):
        placed = place(view, wish)
        assert placed is not None
        assert (placed.executor, placed.matched_tokens, placed.tokens) == ("a", 1500, tokens)


def test_a_prompt_that_is_longer_than_the_own_does_not_count_as_ahead() -> None:
    busy = executor("a", resident=holding(), ahead={"acme": (2000, 500)})
    asked = [Wish("tiny", REVISION, 8, tenant="acme", prompt_tokens=tokens) for tokens in (400, 1999, 2000)]
    assert [chosen(busy, wish=wish) for wish in asked] == ["a", "a", ""]


def test_a_request_goes_only_where_prompt_and_answer_fit() -> None:
    fleet = (executor("a", max_context=2048), executor("b", max_context=8192, in_flight=3))
    assert chosen(*fleet, wish=Wish("tiny", "", 0, length=2048)) == "a"
    assert chosen(*fleet, wish=Wish("tiny", "", 0, length=2049)) == "b"
    decision = choose(FleetView(fleet), Wish("tiny", "", 0, length=9000))
    assert decision.executor == ""
    assert decision.candidates[0].reasons[0] == "takes up to 2048 tokens, the request may need 9000"


def test_a_long_request_does_not_keep_short_ones_of_its_tenant_from_going() -> None:
    queue = FairQueue(Ledger(), max_queued=10, max_running=10, residence_s=30)
    for name, length in (("long", 5000), ("short", 100)):
        queue.offer(
            Waiting(id=name, tenant="t", base_model="tiny", revision_id=REVISION, rank=8, prompt_tokens=10, priority=0,
                    arrived=0.0, length=length)
        )  # fmt: skip
    view = FleetView((executor("a", max_context=2048, resident=holding()),))
    turn = queue.take(("tiny",), lambda request: place(view, Wish("tiny", REVISION, 8, length=request.length)), now=0.0)
    assert turn.request.id == "short"
