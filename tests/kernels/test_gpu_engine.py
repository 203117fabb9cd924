"""A whole engine on the GPU's parts, played on a CPU: kernels in Triton's interpreter, graphs that record, a link.

Its answers are PEFT's. What a real device does differently (streams, speed, a library's attention) is not seen here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import tests.kernels.triton_rig  # noqa: F401  (skips where there is no interpreter)
from services.executor.engine.backend import Backend, Gpu, torch_attention
from services.executor.engine.device_link import CpuLink
from services.executor.kernels import gpu_lora
from services.executor.kernels.graphs import CaptureBudget
from services.executor.kernels.variants import KernelTable, Measured
from services.executor.model.native import load_native
from services.executor.request import Sampling
from tests.support.harness import SMALL, World
from tests.support.recorded_graphs import RecordedGraphs
from tests.support.tiny import ALL, Bundle, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter

ADAPTERS = {
    "some": {"r": 3, "lora_alpha": 5, "target_modules": ["gate_proj", "down_proj"]},
    "all": {"r": 12, "lora_alpha": 16, "target_modules": ALL, "rank_pattern": {"up_proj": 17}},
    "head": {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "v_proj"]},
}
TOKENS = (5, 6, 7, 8)  # of the base and of each adapter: rows leave one after the other


@dataclass(frozen=True, slots=True)
class Family:
    """A base, bundles, and what PEFT answers to each one's own prompt; the base first."""

    folder: Path
    bundles: tuple[Bundle, ...]
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[list[int], ...]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("gpu")
    base = make_base(folder / "base")
    prompts = tuple(prompt_of(4 + 2 * i) for i in range(len(ADAPTERS) + 1))
    bundles, answers = [], [greedy(base, prompts[0], TOKENS[0])]
    for seed, (name, lora) in enumerate(ADAPTERS.items()):
        make_adapter(base, folder / name, seed=seed, **lora)
        bundles.append(read_bundle(base, folder / name))
        answers.append(greedy(with_adapter(base, folder / name), prompts[seed + 1], TOKENS[seed + 1]))
    return Family(folder / "base", tuple(bundles), prompts, tuple(answers))


pytestmark = pytest.mark.usefixtures("interpreter")


def open_gpu(family: Family, graphs: RecordedGraphs | None, **sizes: int) -> World:
    backend = Backend(
        device=torch.device("cpu"), pool_dtype=torch.float32, link=CpuLink(), attention=torch_attention,
        gpu=Gpu("NVIDIA H200", 1), graphs=graphs, budget=CaptureBudget(seconds=600.0),
    )  # fmt: skip
    return World(
        load_native(family.folder, dtype=torch.float32), replace(SMALL, pool_bytes=2**23, **sizes), backend
    )  # fmt: skip


def answer_all(world: World, family: Family) -> list[str]:
    """Answer every prompt by its adapter, joining one after the other; assert PEFT's tokens; return the kernel paths."""
    for bundle in family.bundles:
        world.load(bundle.host())
    for i, revision in enumerate([None, *(b.revision_id for b in family.bundles)]):
        world.submit(f"q{i}", family.prompts[i], revision, sampling=Sampling(max_tokens=TOKENS[i]))
        world.step(i)
    world.finish()
    assert [t.tokens for t in world.transcripts.values()] == list(family.answers)
    return [t.ended[0].kernel_path for t in world.transcripts.values()]


def test_an_engine_on_the_kernels_answers_as_peft(family: Family) -> None:
    world = open_gpu(family, None)
    paths = answer_all(world, family)
    assert paths[0] == "base"
    assert all(path.startswith("triton-") for path in paths[1:])
    assert not any(path.endswith("-graph") for path in paths)


NARROW, WIDE = "triton-decode-4x8", "triton-prefill-16x16"


def test_decode_steps_are_replayed_and_answer_the_same(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 1, 2 and 4 rows, adapters that join and leave, base rows beside them, padding rows before them; on
    other kernels while an adapter of rank 17 is among them."""
    table = KernelTable("NVIDIA H200", (Measured(4, 16, NARROW), Measured(4, 256, WIDE)))
    monkeypatch.setattr(gpu_lora, "load_table", lambda gpu: table)
    graphs = RecordedGraphs()
    world = open_gpu(family, graphs, max_rows=4)
    captured = world.engine._runner._graphs
    assert captured is not None
    sizes = {(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2), (4, 4)}
    assert {(b.rows, b.adapters) for b in captured.buckets} == sizes
    assert {b.variant for b in captured.buckets} == {"", NARROW, WIDE}
    assert len(graphs.graphs) == len(captured.buckets)
    at_start = [graph.replays for graph in graphs.graphs]
    paths = answer_all(world, family)
    assert paths[0] == "base"
    assert paths[1:] == [WIDE + "-graph", WIDE + "-graph", NARROW + "-graph"]
    used = [graph.replays - before for graph, before in zip(graphs.graphs, at_start, strict=True)]
    assert sum(used) >= 3
    assert sum(count > 0 for count in used) >= 3, "one step after the other takes another bucket"
    cache = world.engine._runner.cache
    assert not cache.k[:, 0].any(), "the null block stays zero"
    assert not cache.v[:, 0].any()
    world.assert_idle()
