"""The device thread: commands from many threads, drain, close, and a bug that must not leave anybody waiting."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from services.executor.engine.build import build_engine
from services.executor.engine.loop import Engine
from services.executor.model.native import load_native
from services.executor.request import Ended, FinishReason, RefusalReason, Refused, RequestSpec, Sampling
from tests.support.harness import SMALL, Transcript
from tests.support.tiny import greedy, make_base, prompt_of


class Waiter(Transcript):
    """A transcript that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def sink(self, event: object) -> None:
        super().sink(event)
        if isinstance(event, Ended):
            self.over.set()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("thread")
    return make_base(folder / "base"), folder / "base"


def start(folder: Path, faults: list[BaseException] | None = None) -> Engine:
    engine = build_engine(
        load_native(folder, dtype=__import__("torch").float32),
        base_digest="sha256:base",
        sizes=SMALL,
        clock=time.monotonic,
        on_fault=(faults if faults is not None else []).append,
    )
    engine.start()
    return engine


def ask(engine: Engine, request_id: str, length: int = 20, count: int = 12) -> Waiter:
    waiter = Waiter()
    sampling = Sampling(max_tokens=count, ignore_eos=count > 12)
    engine.submit(RequestSpec(request_id=request_id, prompt=prompt_of(length), sampling=sampling), waiter.sink)
    return waiter


def test_requests_from_many_threads_get_their_own_answers(base) -> None:
    model, folder = base
    engine = start(folder)
    found: dict[int, Waiter] = {}

    def work(i: int) -> None:
        found[i] = ask(engine, f"t{i}", length=10 + i)
        if i % 3 == 0:
            engine.cancel(f"t{i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, waiter in found.items():
        assert waiter.over.wait(60)
        if waiter.ended[0].reason is not FinishReason.CANCELLED:
            assert waiter.tokens == greedy(model, prompt_of(10 + i), 12)
    assert engine.state().open_requests == 0
    engine.close()
    engine.close()


def test_drain_refuses_new_work_and_lets_the_rest_end(base) -> None:
    engine = start(base[1])
    running = ask(engine, "x", count=40)
    engine.drain()
    with pytest.raises(Refused) as refused:
        ask(engine, "y")
    assert refused.value.reason is RefusalReason.DRAINING
    assert running.over.wait(60)
    assert running.ended[0].reason is FinishReason.LENGTH
    engine.close()


def test_close_ends_what_runs(base) -> None:
    engine = start(base[1])
    running = [ask(engine, f"x{i}", count=200) for i in range(20)]
    engine.close()
    assert all(w.over.is_set() for w in running)
    assert {w.ended[0].reason for w in running} <= {FinishReason.DRAINING, FinishReason.LENGTH}
    with pytest.raises(Refused):
        engine.evict("sha256:x").result(60)
    with pytest.raises(RuntimeError, match="started before"):
        engine.start()


def test_a_bug_in_the_loop_ends_every_request_and_refuses_more(base) -> None:
    faults: list[BaseException] = []
    engine = start(base[1], faults)
    engine._scheduler.commit = None  # type: ignore[assignment,method-assign]
    waiter = ask(engine, "x", count=200)
    assert waiter.over.wait(60)
    assert waiter.ended[0].reason is FinishReason.ENGINE_FAULT
    assert engine.state().failed
    assert faults
    with pytest.raises(Refused):
        ask(engine, "y")
    engine.close()


def test_who_gives_up_asking_harms_nobody(base) -> None:
    faults: list[BaseException] = []
    engine = start(base[1], faults)
    begun, go_on, answered = threading.Event(), threading.Event(), []

    def slow() -> str:
        begun.set()
        assert go_on.wait(60)
        return "late"

    first = engine.ask(slow)
    assert begun.wait(60)
    later = [engine.ask(lambda: answered.append(1)), engine.ask(lambda: 1 // 0), engine.evict("sha256:x")]
    for given_up in (first, *later):
        given_up.cancel()
    go_on.set()
    assert engine.ask(lambda: "still here").result(60) == "still here"
    assert answered == [1]
    running = ask(engine, "x")
    assert running.over.wait(60)
    assert running.ended[0].reason is FinishReason.LENGTH
    assert faults == []
    engine.close()
