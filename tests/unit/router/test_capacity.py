"""What is asked of the pools, whether it fits, and how routers tell each other."""

import json

import pytest

from services.router.capacity import WINDOW_S, Need, Pool, PoolNeeds, verdict
from services.router.gauges import Gauges, decode
from services.router.popularity import WINDOW_S as WORK_WINDOW_S
from services.router.popularity import Popularity
from services.shared.clock import ManualClock


def needs_of(*calls: tuple[str, str, str, int, bool, float]) -> PoolNeeds:
    needs = PoolNeeds()
    for executor, revision, tenant, pages, cold, now in calls:
        needs.used(executor, revision, tenant=tenant, pages=pages, cold=cold, now=now)
    return needs


def test_a_working_set_is_what_was_asked_for_of_late() -> None:
    needs = needs_of(
        ("e0", "a", "acme", 2, True, 0.0),
        ("e0", "b", "acme", 4, True, 10.0),
        ("e0", "b", "acme", 4, False, 11.0),
        ("e1", "a", "acme", 2, True, 12.0),
    )
    assert needs.need("e0", 20.0) == Need(6, frozenset("ab"), 2, 0, {})
    assert needs.active_pages(frozenset({"e0", "e1"}), 20.0) == (2, 6)
    assert needs.need("e0", 5.0 + WINDOW_S).revisions == {"b"}


def test_a_load_of_what_was_there_is_its_tenants_thrash_until_the_window_has_passed() -> None:
    needs = needs_of(
        ("e0", "a", "acme", 2, True, 0.0),
        ("e0", "a", "globex", 2, True, 60.0),
        ("e0", "b", "acme", 2, True, 61.0),
    )
    assert needs.need("e0", 62.0).thrashing == {"globex": 1}
    needs.used("e0", "a", tenant="acme", pages=2, cold=True, now=61.0 + WINDOW_S)
    assert needs.need("e0", 61.0 + WINDOW_S).reloads == 0


def pool(name: str, pages: int, need: int, *, reloads: int = 0) -> Pool:
    return Pool(name, "tiny", pages, Need(pages=need, reloads=reloads))


@pytest.mark.parametrize(
    ("pools", "active", "fits", "words"),
    [
        ([pool("e0", 8, 6), pool("e1", 8, 8)], 14, True, "fits: 14 pages of 16"),
        ([pool("e0", 8, 6), pool("e1", 8, 9)], 15, False, "not e1"),
        ([pool("e0", 8, 8), pool("e1", 8, 9)], 17, False, "no longer fits: 17 pages of 16"),
        ([pool("e0", 8, 6, reloads=3)], 6, True, "e0 loaded again"),
        ([pool("e0", 0, 6)], 6, True, "no executor has said"),
    ],
)
def test_it_is_said_when_the_active_set_no_longer_fits(pools: list[Pool], active: int, fits: bool, words: str) -> None:
    found, said = verdict(pools, active)
    assert found is fits
    assert words in said


class Shelf:
    """A notice board in memory."""

    def __init__(self) -> None:
        self.reports: dict[str, bytes] = {}

    async def put_report(self, kind: str, router: str, report: bytes, *, ttl_s: int) -> bool:
        self.reports[router] = report
        return True

    async def get_reports(self, kind: str) -> dict[str, bytes]:
        return dict(self.reports)

    async def drop_report(self, kind: str, router: str) -> None:
        self.reports.pop(router, None)


class Router:
    def __init__(self, name: str, shelf: Shelf, clock: ManualClock) -> None:
        self.needs, self.popularity = PoolNeeds(), Popularity(most=4)
        self.gauges = Gauges(shelf, self.needs, self.popularity, router=name, clock=clock)


async def test_a_router_that_is_started_again_reads_popularity_and_thrash_back() -> None:
    shelf, clock = Shelf(), ManualClock()
    old = Router("old", shelf, clock)
    start = clock.monotonic()
    for second in range(int(4 * WORK_WINDOW_S)):
        old.popularity.worked("hot", 1000.0, start + second)
    clock.advance(4 * WORK_WINDOW_S)
    old.needs.used("e0", "hot", tenant="acme", pages=2, cold=True, now=clock.monotonic())
    old.needs.used("e0", "hot", tenant="acme", pages=2, cold=True, now=clock.monotonic())
    homes = old.popularity.replicas("hot", clock.monotonic())
    assert homes > 1
    await old.gauges.once()
    clock.advance(20.0)
    new = Router("new", shelf, clock)
    await new.gauges.once()
    await new.gauges.once()
    assert new.popularity.replicas("hot", clock.monotonic()) == homes
    found = new.needs.need("e0", clock.monotonic())
    assert (found.pages, found.loads, found.thrashing) == (2, 1, {"acme": 1})
    # What is old is nothing any more, and its report goes.
    clock.advance(WINDOW_S + 60.0)
    await new.gauges.once()
    assert "old" not in shelf.reports
    assert new.needs.need("e0", clock.monotonic()) == Need()


async def test_a_board_that_lies_changes_nothing() -> None:
    shelf, clock = Shelf(), ManualClock()
    router = Router("me", shelf, clock)
    shelf.reports = {
        "a": b"[]",
        "b": json.dumps({"time": clock.now(), "uses": [["e0"]], "homes": {"x": "y"}}).encode(),
        "c": json.dumps({"time": clock.now(), "uses": [], "homes": {"x": 1000}}).encode(),
        "d": b'{"time": 1e999, "uses": [], "homes": {}}',
    }
    await router.gauges.once()
    assert router.popularity.replicas("x", clock.monotonic()) == 4
    assert router.needs.need("e0", clock.monotonic()) == Need()
    assert decode(b"x") is None
