"""Capturing decode steps: within a budget that is measured, and only what replays to an eager step's bits."""

from __future__ import annotations

import pytest
import torch

from services.executor.engine.decode_graphs import DecodeGraphs
from services.executor.engine.device_pool import DevicePool
from services.executor.kernels.graphs import Bucket, CaptureBudget
from services.executor.kernels.layout import RowLayout
from services.executor.model.attention import AttentionSpan, KvCache
from services.executor.model.interface import Packed
from services.executor.model.lora_linear import base_batch
from services.executor.model.native import NativeDecoder, load_native
from services.executor.model.paged_attention import TorchAttention
from services.executor.plan import Row
from services.executor.request import Sampling
from tests.support.recorded_graphs import RecordedGraph, RecordedGraphs
from tests.support.tiny import make_base

BLOCK = 4


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> NativeDecoder:
    folder = tmp_path_factory.mktemp("graphs")
    make_base(folder / "base")
    return load_native(folder / "base", dtype=torch.float32, max_context=32)


class NoAdapters:
    def usual_variants(self, rows: int, adapters: int) -> tuple[str, ...]:
        raise AssertionError("no step of these has an adapter")


def graphs_of(decoder: NativeDecoder, device: RecordedGraphs) -> tuple[DecodeGraphs, TorchAttention]:
    info = decoder.info
    cache = KvCache(
        layers=info.layers, blocks=12, block_size=BLOCK, kv_heads=info.kv_heads, head_dim=info.head_dim,
        dtype=info.dtype, spare=True,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(1)
    for tensor in (cache.k, cache.v):
        tensor[:, 1:12] = torch.randn(tensor[:, 1:12].shape, generator=noise)
    attention = TorchAttention(cache, q_heads=info.heads, kv_heads=info.kv_heads, max_context=info.max_context)
    pool = DevicePool(decoder.groups, page_count=1, rows_per_page=8)
    graphs = DecodeGraphs(decoder, pool, NoAdapters(), attention, device=device, where=torch.device("cpu"))
    return graphs, attention


def row(start: int, blocks: tuple[int, ...], **changes: object) -> Row:
    made = {
        "request_id": "x", "revision_id": None, "start": start, "tokens": (7 + start,), "blocks": blocks,
        "sample": True, "sampling": Sampling(), "generated": 1,
    }  # fmt: skip
    return Row(**{**made, **changes})


ROWS = (row(6, (3, 2)), row(2, (5,)), row(9, (7, 6, 8)))


def capture(graphs: DecodeGraphs, *, seconds_each: float = 0.0):
    now = iter(range(10**6))
    budget = CaptureBudget(seconds=25.0)
    return graphs.capture(max_rows=4, max_adapters=0, budget=budget, clock=lambda: next(now) * seconds_each)


@torch.inference_mode()
def test_a_replayed_step_is_an_eager_one_and_only_plain_steps_are_replayed(decoder: NativeDecoder) -> None:
    graphs, attention = graphs_of(decoder, RecordedGraphs())
    report = capture(graphs)
    assert graphs.buckets == (Bucket(4, 0), Bucket(2, 0), Bucket(1, 0))
    assert (report.captured, report.over_budget, report.unequal) == (3, (), ())
    for rows in (ROWS, ROWS[:1], ROWS[1:], ROWS):
        got = graphs.run(rows, [None] * len(rows), ())
        assert got is not None
        spans = [AttentionSpan(i, 1, r.start, r.blocks) for i, r in enumerate(rows)]
        tokens, places = (torch.tensor(x) for x in ([r.tokens[0] for r in rows], [r.start for r in rows]))
        lora = base_batch(RowLayout(len(rows), len(rows), ()))
        wanted = decoder.logits(decoder.hidden(Packed(tokens, places, attention.step(spans), lora)), lora)
        torch.testing.assert_close(got[0], wanted)
        assert got[1] == "base"
    for strange in (row(2, (5,), tokens=(1, 2)), row(2, (5,), sample=False), row(2, (5,), targets=(1,))):
        assert graphs.run((ROWS[0], strange), [None, None], ()) is None
    assert graphs.run(ROWS + ROWS, [None] * 6, ()) is None, "more rows than any bucket"


def test_capturing_stops_when_the_time_is_spent(decoder: NativeDecoder) -> None:
    graphs, _ = graphs_of(decoder, RecordedGraphs())
    report = capture(graphs, seconds_each=10.0)
    assert graphs.buckets == (Bucket(4, 0), Bucket(2, 0)), "large ones first"
    assert report.over_budget == (Bucket(1, 0),)


def test_a_graph_that_does_not_replay_what_it_recorded_is_not_used(
    decoder: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedGraph, "replay", lambda self: None)
    graphs, _ = graphs_of(decoder, RecordedGraphs())
    report = capture(graphs)
    assert graphs.buckets == ()
    assert len(report.unequal) == 3
    with torch.inference_mode():
        assert graphs.run(ROWS, [None] * 3, ()) is None
