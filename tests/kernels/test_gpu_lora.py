"""A GPU's steps, played in Triton's interpreter: chosen kernels, one scratch, the torch twin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.executor.kernels import gpu_lora
from services.executor.kernels.layout import make_layout
from services.executor.kernels.reference import ReferenceStep
from services.executor.kernels.shrink_expand import Bank
from services.executor.kernels.variants import TABLE_SCHEMA, VARIANTS
from services.executor.kernels.work import WorkLimits
from tests.kernels.triton_rig import PAGE, TOLERANCE, Rig, group_of

pytestmark = pytest.mark.usefixtures("interpreter")


def lora_of(rig: Rig, gpu: str = "NVIDIA H200") -> gpu_lora.GpuLora:
    banks = {"g": Bank(rig.a, rig.b, rig.scale, rig.group.out_features)}
    limits = WorkLimits(rows=256, adapters=8, rank=64, pages=rig.page_count)
    return gpu_lora.GpuLora((rig.group,), banks, rows_per_page=PAGE, limits=limits, gpu=gpu, multiprocessors=1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_torch_step_equals_the_twin(dtype: torch.dtype) -> None:
    rig = Rig(group_of(96, (40, 24)), [3, 0, 17], dtype)
    layout = make_layout([None, 0, 1, 2], [2, 3, 1, 9])
    y, x = rig.inputs(layout)
    got = y.clone()
    banks = {"g": Bank(rig.a, rig.b, rig.scale, rig.group.out_features)}
    ReferenceStep(layout, tuple(rig.residents), banks, PAGE).add("g", 1, got, x)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(got, rig.expected(y, x, layout, 1), atol=atol, rtol=rtol, equal_nan=True)


def test_each_step_takes_the_kernels_that_suit_it_and_all_share_one_scratch() -> None:
    rig = Rig(group_of(64, (64, 40)), [3, 16], torch.float32)
    lora = lora_of(rig)
    seen = {}
    for rows in ((1, 1), (4, 2), (16, 3), (100, 60)):
        layout = make_layout([None, 0, 1], [1, *rows])
        y, x = rig.inputs(layout)
        got = y.clone()
        step = lora.arrange(layout, rig.residents)
        step.add("g", 0, got, x)
        torch.testing.assert_close(got, rig.expected(y, x, layout, 0), atol=1e-4, rtol=1e-4, equal_nan=True)
        seen[rows] = step.path
    assert seen == {
        (1, 1): "triton-decode-1x8",
        (4, 2): "triton-decode-4x8",
        (16, 3): "triton-prefill-16x16",
        (100, 60): "triton-prefill-64x16",
    }
    scratches = {kernels.scratch.data_ptr() for kernels in lora._kernels.values()}
    assert len(scratches) == 1
    assert lora.memory_bytes < 2**22


def test_every_variant_is_compiled_before_the_first_request() -> None:
    rig = Rig(group_of(64, (64,)), [3], torch.float32)
    lora = lora_of(rig)
    before = rig.a.clone(), rig.b.clone()
    assert lora.compile() == len(VARIANTS)
    assert torch.equal(rig.a.nan_to_num(1), before[0].nan_to_num(1))
    assert torch.equal(rig.b.nan_to_num(1), before[1].nan_to_num(1))


def test_without_triton_a_step_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lora, "find_spec", lambda name: None)
    rig = Rig(group_of(64, (64,)), [3], torch.float32)
    lora = lora_of(rig)
    assert lora.compile() == lora.memory_bytes == 0
    assert lora.arrange(make_layout([0], [2]), rig.residents).path == "torch-reference"


def test_a_measured_table_is_found_by_the_gpus_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lora, "TABLES", tmp_path)
    assert gpu_lora.load_table("NVIDIA H200") is None
    document = {"schema": TABLE_SCHEMA, "gpu": "NVIDIA H200"}
    document["entries"] = [{"rows": 1, "rank": 256, "variant": "triton-prefill-16x16"}]
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(document))
    rig = Rig(group_of(64, (64,)), [3], torch.float32)
    assert lora_of(rig).arrange(make_layout([0], [1]), rig.residents).path == "triton-prefill-16x16"
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(document | {"gpu": "NVIDIA H100"}))
    with pytest.raises(ValueError, match="was measured on"):
        gpu_lora.load_table("NVIDIA H200")
    for bad in (b"", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1}', b" " * 2**21):
        (tmp_path / "nvidia-h200.json").write_bytes(bad)
        with pytest.raises(ValueError, match=r"nvidia-h200.json is (not a kernel table|too large)"):
            gpu_lora.load_table("NVIDIA H200")
    assert gpu_lora.table_path("../../etc/NVIDIA").parent == tmp_path
