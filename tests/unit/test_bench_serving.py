"""The serving benchmark measures what it says: whole answers, parts that add up, bounds that count everything once."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import serving_ceilings, serving_load
from bench.serving_ceilings import Breakdown, Machine, ceiling
from bench.serving_engine import EngineBench
from bench.serving_load import churn, memory_per_rank, percentile, resident_mib
from bench.serving_peers import TransformersPeer
from bench.serving_work import make_adapter, make_prompts
from tests.support.compiled import compiled_step
from tests.support.tiny import make_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "base"
    make_base(folder, tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def bench(base: Path) -> EngineBench:
    return EngineBench(base, "float32", threads=1, compiled="off")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_is_whole_answers_and_its_parts_add_up(
    base: Path, bench: EngineBench, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    if compiled:
        compiled_step()  # or there is none on this machine
        bench = EngineBench(base, "float32", threads=1, compiled="on")
    # A clock that ticks when it is read: a pause of this process would be found in whatever part it fell into.
    monkeypatch.setattr(serving_ceilings, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    adapter = make_adapter(bench.decoder.groups, 1, 8, torch.bfloat16)
    bench.load(adapter)
    breakdown = Breakdown(bench.engine)
    with breakdown.watch():
        seconds, streams = bench.batch([None, adapter.name, adapter.name], prompt=20, new=9)
    assert seconds > 0
    assert [len(stream.times) for stream in streams] == [9, 9, 9]
    path = "cpu-compiled" if compiled else "cpu-torch-paged"
    assert [stream.path for stream in streams] == ["base", path, path]
    parts = breakdown.parts()
    step = parts.pop("step")
    assert sum(parts.values()) == pytest.approx(step)
    assert min(parts.values()) > 0
    assert 0 < breakdown.overhead < 1
    before = breakdown.steps
    bench.batch([None], prompt=4, new=2)
    assert breakdown.steps == before, "the methods are put back"


def test_bounds_count_weights_adapters_and_keys_once(bench: EngineBench) -> None:
    one = make_adapter(bench.decoder.groups, 2, 8, torch.bfloat16)
    unit = Machine(bytes_s=1000.0, flops_s=1000.0)
    base_one, base_two = (ceiling(unit, bench.decoder, [None] * n, [], context=0) for n in (1, 2))
    assert base_one.memory_ms == base_two.memory_ms == 4 * (256 * 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128))
    assert base_two.arithmetic_ms == 2 * base_one.arithmetic_ms
    adapted = ceiling(unit, bench.decoder, [one.name] * 2, [one], context=0)
    extra = sum(a.numel() + b.numel() for a, b in one.modules.values())
    assert adapted.memory_ms - base_two.memory_ms == 4 * extra
    assert adapted.arithmetic_ms - base_two.arithmetic_ms == 2 * 2 * extra
    assert ceiling(unit, bench.decoder, [None], [], context=10).memory_ms > base_one.memory_ms


def test_memory_is_counted_and_cycles_leave_nothing_behind(bench: EngineBench, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = bench.decoder.groups
    assert memory_per_rank(bench, [make_adapter(groups, 3, rank, torch.bfloat16) for rank in (8, 64)]) == 1.0
    free = bench.engine.state().free_pages
    before, cycles, loads = resident_mib(), [], bench.engine.state().loads_done
    assert before > 0

    def noted() -> float:
        """How much this process has depends on when the garbage of other tests is collected."""
        cycles.append(bench.engine.state().loads_done - loads)
        return before + len(cycles)

    monkeypatch.setattr(serving_load, "resident_mib", noted)
    assert churn(bench, 20) == (before + 1, before + 2)
    assert cycles == [3, 20], "after the first tenth, and at the end"
    assert bench.engine.state().free_pages == free


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile(list(range(100)), 0.5) == 50


def test_peers_say_when_steps_were_extrapolated(bench: EngineBench, base: Path) -> None:
    prompts = make_prompts(2, 12, 256, 1)
    peer = TransformersPeer(base, torch.float32)
    whole = peer.measure(prompts, [None, None], 12, budget_s=600.0, rounds=2)
    assert (whole.rounds, whole.cut) == (2, False)
    adapter = make_adapter(bench.decoder.groups, 4, 8, torch.bfloat16)
    peer.adapt([adapter])
    short = peer.measure(prompts, [None, adapter.name], 200, budget_s=0.0)
    assert (short.rounds, short.cut) == (3, True)
