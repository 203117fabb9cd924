"""Loads as the event loop sees them: who joins, who leaves, what waits for what. Device, loader and registry obey."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from services.executor import berths as module
from services.executor.berths import STAGED, Berths
from services.executor.engine.loads import Lease
from services.executor.ports import HostBytes, Stage, Standing
from services.executor.request import RefusalReason, Refused
from services.shared.clock import SystemClock
from services.shared.errors import LoraportError
from services.shared.statements import Record
from tests.loader_rig import until

BASE = "sha256:" + "b" * 64
A, B, C = ("sha256:" + c * 64 for c in "acd")


@dataclass
class Away:
    """Everything around berths. `gates` hold the loader, `room` the engine, `busy` a staging thread."""

    resident: set[str] = field(default_factory=set)
    leases: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    room: dict[str, Future[Lease]] = field(default_factory=dict)
    full: bool = False
    base: str = BASE
    states: int = 0
    staging: Any = None

    @property
    def engine(self) -> Away:
        return self

    def acquire(self, revision_id: str) -> Lease | None:
        if revision_id not in self.resident:
            return None
        self.leases[revision_id] += 1
        return Lease(revision_id, lambda: self.leases.subtract([revision_id]))

    def load(self, staged: Any, *, tenant: str) -> Future[Lease]:
        answer: Future[Lease] = Future()
        self.room[staged] = answer
        if not self.full:
            self.make_room(staged)
        return answer

    def make_room(self, revision_id: str) -> None:
        self.resident.add(revision_id)
        lease = self.acquire(revision_id)
        assert lease is not None
        self.room[revision_id].set_result(lease)

    def state(self) -> Any:
        self.states += 1
        return SimpleNamespace(residents=[SimpleNamespace(revision_id=r) for r in self.resident])

    def revoke(self, revision_id: str, *, final: bool) -> None:
        self.resident.discard(revision_id)

    def stage(self, revision_id: str) -> str:
        if self.staging is not None:
            self.staging(revision_id)
        return revision_id

    async def fetch(self, revision_id: str, *, size_bytes: int, on_stage: Any) -> HostBytes:
        self.fetched[revision_id] += 1
        on_stage(Stage("FETCH", 1.0))
        if revision_id in self.gates:
            await self.gates[revision_id].wait()
        return HostBytes(memoryview(revision_id.encode()), b"")

    async def require_fresh(self) -> None:
        pass

    async def standing(self, revision_id: str, tenant: str = "") -> Standing:
        return Standing(
            Record(
                revision_id=revision_id, tenant="acme", adapter="x", version=1, base_id=self.base, weights_digest="",
                weights_size=1, state="ACTIVE", sequence=1, issued_time=1,
            ),
            frozenset(),
        )  # fmt: skip


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Away:
    monkeypatch.setattr(module, "read_sealed", lambda record, host: bytes(host.data).decode())
    return Away()


def make(away: Away, max_loads: int = 2) -> Berths:
    return Berths(
        away, loader=away, registry=away, base_id=BASE, clock=SystemClock(), max_loads=max_loads, timeout_s=60.0
    )  # type: ignore[arg-type]


async def test_who_asks_in_the_moment_in_which_the_last_one_leaves_gets_a_load_of_its_own(away: Away) -> None:
    berths = make(away)
    away.gates[A] = asyncio.Event()
    leaver = asyncio.create_task(berths.hold(A))
    await until(lambda: away.fetched[A])
    leaver.cancel()
    stayer = asyncio.create_task(berths.hold(A))  # runs after the leaver, before its load
    away.gates[A].set()
    lease, _ = await asyncio.wait_for(stayer, 60)
    assert away.fetched[A] == 2
    lease.release()
    await berths.close()
    assert away.leases[A] == 0


async def test_a_load_that_fails_without_waiting_for_anything_is_told_to_who_watches_it(away: Away) -> None:
    berths = make(away)
    away.base = "sha256:" + "0" * 64
    with pytest.raises(LoraportError, match="WRONG_BASE"):
        await asyncio.wait_for(anext(berths.ensure(A)), 60)


async def test_who_stops_watching_a_load_leaves_no_lease(away: Away) -> None:
    berths = make(away)
    stages = berths.ensure(A)
    assert (await anext(stages)).name == "FETCH"
    await until(lambda: away.resident)
    await stages.aclose()
    await until(lambda: not berths.loading and not away.leases[A])


async def test_loads_that_wait_for_room_hold_up_no_others(away: Away) -> None:
    berths = make(away, max_loads=1)
    away.full = True
    waiting = [asyncio.create_task(berths.hold(f"{A}{n}")) for n in range(STAGED + 3)]
    await until(lambda: len(away.room) == STAGED)
    assert sum(away.fetched.values()) == STAGED, "and no more of them are in memory"
    away.make_room(f"{A}0")
    await until(lambda: len(away.room) == STAGED + 1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    away.full = False
    lease, _ = await asyncio.wait_for(berths.hold(B), 60)
    lease.release()


@pytest.mark.parametrize("why", ["ADAPTER_TOO_LARGE", "ADAPTER_UNSUPPORTED", "ADAPTER_NOT_FINITE"])
async def test_what_can_never_be_here_is_fetched_once(away: Away, why: str) -> None:
    berths = make(away)

    def refuse(revision_id: str) -> None:
        raise Refused(RefusalReason(why), "never")

    away.staging = refuse
    said = []
    for _ in range(3):
        with pytest.raises(LoraportError) as refused:
            await berths.hold(A)
        said.append((refused.value.reason, str(refused.value)))
    assert away.fetched[A] == 1
    assert len(set(said)) == 1


async def test_what_failed_for_a_moment_is_fetched_again(away: Away) -> None:
    berths = make(away)

    def refuse(revision_id: str) -> None:
        raise Refused(RefusalReason.ADAPTER_POOL_FULL, "now")

    away.staging = refuse
    for _ in range(2):
        with pytest.raises(LoraportError, match="OVERLOADED"):
            await berths.hold(A)
    assert away.fetched[A] == 2


async def test_a_load_that_was_given_up_keeps_its_slot_until_its_thread_ends(away: Away) -> None:
    berths = make(away, max_loads=1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(revision_id: str) -> None:
        begun.set()
        assert go_on.wait(60)

    away.staging = slow
    given_up = asyncio.create_task(berths.hold(A))
    await until(begun.is_set)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert berths.loading == 0
    away.staging = None
    other = asyncio.create_task(berths.hold(B))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not away.fetched[B]
    go_on.set()
    lease, _ = await asyncio.wait_for(other, 60)
    lease.release()


async def test_a_mass_revocation_looks_at_the_engine_once(away: Away) -> None:
    berths = make(away)
    away.gates[C] = asyncio.Event()
    loading = asyncio.create_task(berths.hold(C))
    await until(lambda: away.fetched[C])
    away.resident = {A, B}
    items = [SimpleNamespace(revision_id=r, state="REVOKED") for r in (A, B, C)]
    berths.gone(items)  # type: ignore[arg-type]
    assert away.resident == set()
    assert away.states == 1
    with pytest.raises(LoraportError, match="REVISION_NOT_ACTIVE"):
        await asyncio.wait_for(loading, 60)
    await berths.close()
