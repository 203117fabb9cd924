"""A load on its way to a device that copies by itself: in which order things are told to it, and how much at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.executor.engine.backend import Backend, torch_attention
from services.executor.engine.device_pool import POOL_DTYPE, DevicePool
from services.executor.engine.staging import stage
from services.executor.model.native import load_native
from services.executor.request import RefusalReason, Refused, Sampling
from tests.support.harness import SMALL, World
from tests.support.tiny import ALL, Bundle, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter

PIECE = 4000


class SlowLink:
    """A copy engine of its own: what is put lands when the test says so, and until then the pages hold what they held."""

    pinned = False
    piece_bytes = PIECE

    def __init__(self) -> None:
        self.told: list[str] = []
        self.waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.put_count = self.landed = 0

    def index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers)

    def put(self, target: torch.Tensor, rows: torch.Tensor, source: torch.Tensor) -> None:
        self.told.append("put")
        self.put_count += 1
        self.waiting.append((target, rows, source))

    def after_steps(self) -> None:
        self.told.append("after steps")

    def before_steps(self) -> None:
        self.told.append("before steps")
        self.land()  # the steps' stream waits for the copies

    def mark(self) -> Mark:
        self.told.append("mark")
        return Mark(self, self.put_count)

    def land(self) -> None:
        for target, rows, source in self.waiting:
            target.index_copy_(1, rows, source)
        self.landed += len(self.waiting)
        self.waiting.clear()


class Mark:
    def __init__(self, link: SlowLink, puts: int) -> None:
        self.link, self.puts = link, puts

    def query(self) -> bool:
        return self.link.landed >= self.puts


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle, list[int]]:
    folder = tmp_path_factory.mktemp("link")
    base = make_base(folder / "base")
    make_adapter(base, folder / "a", seed=3, r=12, lora_alpha=16, target_modules=ALL)
    answer = greedy(with_adapter(base, folder / "a"), prompt_of(9), 4)
    return folder / "base", read_bundle(base, folder / "a"), answer


@pytest.fixture
def slow(family: tuple[Path, Bundle, list[int]], monkeypatch: pytest.MonkeyPatch) -> tuple[World, SlowLink]:
    link = SlowLink()
    backend = Backend(device=torch.device("cpu"), pool_dtype=POOL_DTYPE, link=link, attention=torch_attention)
    world = World(load_native(family[0], dtype=torch.float32), SMALL, backend)
    erase = DevicePool._fill

    def fill(pool: DevicePool, pages: Sequence[int], value: float) -> None:
        link.told.append("erase" if value != value else "zero")
        erase(pool, pages, value)

    monkeypatch.setattr(DevicePool, "_fill", fill)
    return world, link


def test_a_revision_is_ready_when_its_bytes_have_landed(family, slow: tuple[World, SlowLink]) -> None:
    world, link = slow
    future = world.engine.load(stage(family[1].host(), world.decoder.groups, dtype=POOL_DTYPE))
    world.step(20)
    assert link.told[:2] == ["zero", "after steps"], "what was given out is zeroed before anything is written"
    assert link.told[-1] == "mark"
    assert link.told.count("put") == link.put_count > 20
    assert not future.done(), "everything is on its way, nothing has landed"
    assert world.engine.acquire(family[1].revision_id) is None
    link.land()
    world.step()
    future.result(timeout=0).release()
    world.submit("x", prompt_of(9), family[1].revision_id, sampling=Sampling(max_tokens=4))
    world.finish()
    assert world.transcripts["x"].tokens == family[2]


def test_running_rows_see_a_bounded_part_of_a_load_per_step(family, slow: tuple[World, SlowLink]) -> None:
    world, link = slow
    world.engine._options = replace(world.engine._options, load_bytes_per_step=2 * PIECE)
    world.submit("base", prompt_of(5), sampling=Sampling(max_tokens=200, ignore_eos=True))
    world.step(2)
    future = world.engine.load(stage(family[1].host(), world.decoder.groups, dtype=POOL_DTYPE))
    most = steps = 0
    while "mark" not in link.told:
        before = len(link.waiting)
        world.step()
        most = max(most, sum(source.nbytes for _, _, source in link.waiting[before:]))
        steps += 1
    assert steps > 10
    scales = 4 * 2 * 12 * 3 * 4  # groups, layers, ranks, subs, bytes: they go with a group's first piece
    assert most <= 2 * PIECE + PIECE + scales
    link.land()
    world.step()
    future.result(timeout=0).release()


def test_pages_of_a_stopped_load_are_erased_after_its_copies(family, slow: tuple[World, SlowLink]) -> None:
    world, link = slow
    future = world.engine.load(stage(family[1].host(), world.decoder.groups, dtype=POOL_DTYPE))
    world.step(3)
    assert link.waiting
    world.engine.revoke(family[1].revision_id, final=False)
    world.step()
    with pytest.raises(Refused) as refused:
        future.result(timeout=0)
    assert refused.value.reason is RefusalReason.REVOKED
    assert link.told.index("before steps") < link.told.index("erase")
    link.land()
    for bank in world.engine._runner.pool.banks.values():
        assert bank.a.isnan().all(), "poison is all there is: no late copy came after it"
