from services.router.fleet_view import ExecutorView, FleetView, newer
from services.router.placement import Wish, choose, too_large
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


def test_resident_first_then_least_in_flight_then_name() -> None:
    assert chosen(executor("a"), executor("b", resident=holding(), in_flight=3)) == "b"
    assert chosen(executor("a", in_flight=1), executor("b")) == "b"
    assert chosen(executor("b"), executor("a")) == "a"


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
    assert too_large(FleetView((small, away)), WISH)
    assert not too_large(FleetView((away,)), WISH)
    assert not too_large(FleetView((small, executor("c"))), WISH)


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
