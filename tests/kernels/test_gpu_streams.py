"""An engine whose device has streams: every number that a step, a copy or an erasure touches is touched in an order.

The engine, its link, graphs and staging are the GPU's; torch.cuda is `tests.support.streams`, which raises on a race.
Each order that the code makes is taken away once, and must be missed. What the kernels compute is played by plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tests.kernels.triton_rig  # noqa: F401  (skips where there is no Triton)
from services.executor.engine.backend import Backend, Gpu, torch_attention
from services.executor.engine.decode_graphs import DecodeGraphs
from services.executor.engine.device_link import CudaLink
from services.executor.engine.graph_device import CudaGraphs
from services.executor.engine.staging import Staged, stage
from services.executor.kernels import streams as streams_of
from services.executor.kernels.graphs import CaptureBudget
from services.executor.kernels.layout import make_layout
from services.executor.kernels.reference import ReferenceStep
from services.executor.kernels.triton_lora import TritonLora
from services.executor.kernels.work import Resident
from services.executor.model.flash_attention import FlashAttention
from services.executor.model.native import load_native
from services.executor.request import Sampling
from tests.support import fake_flashinfer
from tests.support.harness import SMALL, World
from tests.support.streams import Race, Streams
from tests.support.tiny import ALL, Bundle, greedy, make_adapter, make_base, prompt_of, read_bundle, with_adapter
from tests.unit.executor.test_paged_attention import CONTEXT, HEADS, KV_HEADS, STEPS, make_cache, noise_of, spans_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Bundle], list[list[int]]]:
    folder = tmp_path_factory.mktemp("streams")
    base = make_base(folder / "base")
    bundles, answers = [], []
    for seed in range(2):
        make_adapter(base, folder / str(seed), seed=seed, r=12, lora_alpha=16, target_modules=ALL)
        bundles.append(read_bundle(base, folder / str(seed)))
        answers.append(greedy(with_adapter(base, folder / str(seed)), prompt_of(6), 5))
    return folder / "base", bundles, answers


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Streams:
    cuda = Streams()
    cuda.install(monkeypatch.setattr)
    monkeypatch.setattr(streams_of, "on_gpu", lambda device: True)

    def add(lora: TritonLora, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Read and write what the kernels do."""
        assert lora._loaded is not None
        for tensor, writes in ((lora._meta[lora._groups[group]], False), (lora.scratch, True)):
            if cuda._find(tensor) is not None and not cuda.capturing:
                cuda.access(tensor, writes=writes)
        ReferenceStep(*lora._loaded, lora._pool, lora._rows_per_page).add(group, layer, y, x)

    monkeypatch.setattr(TritonLora, "add", add)
    return cuda


@contextmanager
def watched(cuda: Streams, world: World) -> Iterator[DecodeGraphs]:
    """Watch all that lies on the device for longer than a step, and the memory that metadata is sent from."""
    runner = world.engine._runner
    graphs = runner._graphs
    assert graphs is not None
    for name, bank in runner.pool.banks.items():
        cuda.track(f"pages of {name}", bank.a, bank.b, bank.scale)
    cuda.track("keys and values", runner.cache.k, runner.cache.v)
    for lora in runner.pool.kernels._kernels.values():
        cuda.track("work lists", lora._meta)
        cuda.track("scratch", lora.scratch)
        cuda.track("pinned work lists", *lora._hosts, on_host=True)
    for inputs in graphs._inputs.values():
        cuda.track("tokens and positions", inputs.tokens.tensor, inputs.positions.tensor)
        cuda.track(
            "tables", *(t.tensor for t in (inputs.attention._slots, inputs.attention._table, inputs.attention._last))
        )
    cuda.track("logits", *(captured.logits for captured in graphs._captured.values()))
    with cuda:
        yield graphs


def buffers_of(graphs: DecodeGraphs) -> list[int]:
    """Return where the static buffers of all buckets lie."""
    kept = []
    for inputs in graphs._inputs.values():
        tables = (inputs.attention._slots, inputs.attention._table, inputs.attention._last)
        kept += [filled.tensor for filled in (inputs.tokens, inputs.positions, *tables)]
    kept += [lora._meta for lora in graphs._kernels._kernels.values()]
    return [tensor.data_ptr() for tensor in kept]


def open_world(folder: Path) -> World:
    backend = Backend(
        device=CPU, pool_dtype=torch.float32, link=CudaLink(CPU), attention=torch_attention, gpu=Gpu("NVIDIA H200", 1),
        graphs=CudaGraphs(CPU), budget=CaptureBudget(seconds=600.0),
    )  # fmt: skip
    sizes = replace(SMALL, max_rows=2, pool_bytes=2**20)
    return World(load_native(folder, dtype=torch.float32, max_context=32), sizes, backend)


def staged_of(world: World, bundle: Bundle, cuda: Streams) -> Staged:
    staged = stage(bundle.host(), world.decoder.groups, dtype=torch.float32, pinned=True)
    for part in staged.groups.values():
        cuda.track("pinned adapter", part.a, part.b, part.scale, on_host=True)
    return staged


def load(world: World, cuda: Streams, staged: Staged) -> bool:
    """Load while a base row decodes; its copies land a few steps later. Says whether it was ready before."""
    cuda.landed = False
    future = world.engine.load(staged)
    world.step(6)
    early = future.done()
    cuda.landed = True
    world.step(2)
    future.result(timeout=0).release()
    return early


def play(family: tuple[Path, list[Bundle], list[list[int]]], cuda: Streams) -> None:
    """Loads beside rows, rows on what was loaded, pages that pass from one revision to the next, a stopped load."""
    folder, (first, second), answers = family
    world = open_world(folder)
    with watched(cuda, world) as graphs:
        places = buffers_of(graphs)
        world.submit("base", prompt_of(4), sampling=Sampling(max_tokens=25, ignore_eos=True))
        world.step(2)
        for name, bundle, answer in (("a", first, answers[0]), ("b", second, answers[1])):
            early = load(world, cuda, staged_of(world, bundle, cuda))
            world.submit(name, prompt_of(6), bundle.revision_id, sampling=Sampling(max_tokens=5))
            world.step(6)
            assert not early
            assert world.transcripts[name].tokens == answer
            world.engine.evict(bundle.revision_id)
            world.step()
        # A load that is stopped while its copies run; its pages go to the next one.
        cuda.landed = False
        stopped = world.engine.load(staged_of(world, first, cuda))
        world.step(2)
        world.engine.revoke(first.revision_id, final=False)
        world.step()
        assert stopped.exception(timeout=0) is not None
        load(world, cuda, staged_of(world, second, cuda))
        world.submit("c", prompt_of(6), second.revision_id, sampling=Sampling(max_tokens=5))
        world.finish()
        assert world.transcripts["c"].tokens == answers[1]
        assert world.faults == []
        assert buffers_of(graphs) == places, "static buffers keep their place"
        assert sum(graph.replays for graph in cuda.graphs) > len(graphs.buckets) + 10


def nothing(*_: object, **__: object) -> None:
    pass


def any_host(lora: TritonLora) -> tuple[torch.Tensor, torch.cuda.Event]:
    lora._turn = (lora._turn + 1) % len(lora._hosts)
    return lora._hosts[lora._turn], torch.cuda.Event()


def lands_at_once(link: CudaLink) -> object:
    class Landed:
        def query(self) -> bool:
            return True

    return Landed()


def test_everything_is_ordered(family: tuple[Path, list[Bundle], list[list[int]]], cuda: Streams) -> None:
    play(family, cuda)


@pytest.mark.parametrize(
    ("method", "instead", "what"),
    [
        ("engine.device_link.CudaLink.after_steps", nothing, "writes pages of .* that steps has written"),
        ("engine.device_link.CudaLink.before_steps", nothing, "steps writes pages of .* that side 1 has written"),
        ("engine.device_link.CudaLink.mark", lands_at_once, "steps reads pages of .* that side 1 has written"),
    ],
    ids=["erase before write", "write before erase", "land before use"],
)
def test_an_order_that_is_taken_away_is_missed(
    family: tuple[Path, list[Bundle], list[list[int]]], cuda: Streams, monkeypatch: pytest.MonkeyPatch,
    method: str, instead: Callable[..., object], what: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(f"services.executor.{method}", instead)
    with pytest.raises(AssertionError, match=what):  # a Race, or the engine's fault that it became
        play(family, cuda)


@pytest.mark.parametrize("waits", [True, False])
def test_a_steps_metadata_is_not_overwritten_on_its_way(
    family: tuple[Path, list[Bundle], list[list[int]]], cuda: Streams, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    world = open_world(family[0])
    if not waits:
        monkeypatch.setattr(TritonLora, "_next_host", any_host)
    residents = [Resident((0,), {group.name: 8 for group in world.decoder.groups})]
    lost = pytest.raises(Race, match="host writes pinned work lists that steps has read")
    with watched(cuda, world) as graphs, nullcontext() if waits else lost:
        for number in range(10):
            graphs._kernels.arrange(make_layout([0], [1 + number % 2]), residents, variant="triton-decode-1x8")


@pytest.mark.parametrize("waits", [True, False])
def test_a_capture_is_ordered_with_the_steps_around_it(
    family: tuple[Path, list[Bundle], list[list[int]]], cuda: Streams, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """It warms up on a stream of its own, over the buffers and the spare block that steps use."""
    world = open_world(family[0])
    with (
        watched(cuda, world) as graphs,
        nullcontext() if waits else pytest.raises(Race, match=r"tokens|tables|keys|work lists"),
    ):
        world.submit("x", prompt_of(4), sampling=Sampling(max_tokens=6, ignore_eos=True))
        world.step(3)
        if not waits:
            monkeypatch.setattr("tests.support.streams.Stream.wait_stream", nothing)
        graphs.capture(max_rows=2, max_adapters=2, budget=CaptureBudget(), clock=lambda: 0.0)
        world.finish()
        assert len(world.transcripts["x"].tokens) == 6
        assert world.faults == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_plan_does_not_overwrite_the_last_one_on_its_way(
    cuda: Streams, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """FlashInfer plans in pinned memory: prompts that sample nothing follow each other and nobody asks the device."""
    sizes = {"q_heads": HEADS, "kv_heads": KV_HEADS, "max_context": CONTEXT}
    maker = FlashAttention(make_cache(), **sizes, library=fake_flashinfer)
    fixed = maker.fixed(3)

    def go() -> None:
        for step in STEPS:
            spans = spans_of(step)
            maker.step(spans).attend(0, *noise_of(sum(count for count, _ in step)), scale=0.2)
            fixed.fill(spans_of(((1, 0), (1, 7), (1, 16))))
            fixed.attend(0, *noise_of(3), scale=0.2)

    go()
    for wrapper in (*maker._wrappers.values(), *fixed._wrappers.values()):
        cuda.track("pinned plan", wrapper.pinned, on_host=True)
        cuda.track("plan", wrapper.planned)
    if not waits:
        monkeypatch.setattr("tests.support.streams.Event.synchronize", nothing)
    with cuda, nullcontext() if waits else pytest.raises(Race, match="host writes pinned plan that steps has read"):
        go()
        go()
