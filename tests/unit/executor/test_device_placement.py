"""Everything that a step makes lies on the step's device: checked with tensors that have a device and no numbers.

torch's fake tensors refuse any operation over two devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from services.executor.engine.backend import torch_attention
from services.executor.engine.device_pool import DevicePool
from services.executor.engine.sampling import _adjust, _argmax, _draw
from services.executor.kernels.layout import make_layout
from services.executor.kernels.reference import ReferenceStep
from services.executor.kernels.work import Resident
from services.executor.model.attention import AttentionSpan, KvCache
from services.executor.model.interface import Packed
from services.executor.model.kernel_batch import KernelBatch
from services.executor.model.lora_linear import EmbeddingAdapter
from services.executor.model.native import NativeDecoder, load_native
from services.executor.plan import Row
from services.executor.request import Sampling
from tests.support.tiny import make_base

OTHER = torch.device("meta")  # takes every path that is not the CPU's


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed") / "base"
    make_base(folder, "qwen3", head_dim=64)
    return folder


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


def off_cpu(base: Path, monkeypatch: pytest.MonkeyPatch) -> NativeDecoder:
    """A decoder whose every weight is a fake one of another device, in bfloat16."""
    monkeypatch.setattr(
        "services.executor.model.native.Checkpoint.take",
        lambda self, name, shape: self._taken.add(name) or torch.empty(shape, dtype=torch.bfloat16, device=OTHER),
    )
    return load_native(base, dtype=torch.bfloat16, device=OTHER)


def test_a_step_stays_on_its_device(base: Path, monkeypatch: pytest.MonkeyPatch, fake: None) -> None:
    decoder = off_cpu(base, monkeypatch)
    info = decoder.info
    cache = KvCache(
        layers=info.layers, blocks=16, block_size=4, kv_heads=info.kv_heads, head_dim=info.head_dim, dtype=info.dtype,
        device=OTHER, spare=True, poison=True,
    )  # fmt: skip
    pool = DevicePool(decoder.groups, page_count=4, rows_per_page=8, dtype=info.dtype, device=OTHER, poison=True)
    pool.prepare([1, 2])
    cache.clear([3, 4])
    layout = make_layout([None, 0, 0], [1, 1, 6])
    residents = (Resident((2, 1), {group.name: 9 for group in pool.groups}),)
    step = ReferenceStep(layout, residents, pool.banks, pool.rows_per_page)
    embedding = EmbeddingAdapter(
        torch.empty(info.vocab_size, 2, device=OTHER), torch.empty(2, info.hidden_size, device=OTHER), 1.0
    )
    lora = KernelBatch(step, None, ((slice(1, 8), embedding),))
    maker = torch_attention(cache, info)
    spans = [AttentionSpan(0, 1, 5, (3, 4)), AttentionSpan(1, 1, 2, (5,)), AttentionSpan(2, 6, 4, (6, 7, 8))]
    fixed = maker.fixed(8)
    for attention in (maker.step(spans), fixed):
        tokens = torch.zeros(8, dtype=torch.int64, device=OTHER)
        hidden = decoder.hidden(Packed(tokens, tokens, attention, lora))
        logits = decoder.logits(hidden, lora)
        assert (logits.device, logits.dtype, logits.shape) == (OTHER, torch.bfloat16, (8, info.vocab_size))
    sampling = Sampling(logit_bias=((3, 1.0),), min_tokens=2)
    row = Row(
        request_id="x", revision_id=None, start=0, tokens=(1,), blocks=(1,), sample=True, sampling=sampling,
        generated=0,
    )  # fmt: skip
    assert _argmax(logits).device == OTHER
    _adjust(logits[0].float(), row, frozenset({2}))
    for cut in (Sampling(temperature=1.0, min_p=0.1), Sampling(temperature=1.0, top_p=0.9, top_k=3)):
        assert _draw(logits.float(), [replace(row, sampling=cut)] * 8, guess=True).device == OTHER
