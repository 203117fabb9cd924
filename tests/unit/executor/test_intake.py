from __future__ import annotations

import json
import os
import struct
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from loraport.bundle.digest import sha256_digest
from services.executor.engine import staging
from services.executor.engine.staging import Stager, stage
from services.executor.intake import HostAdapter, SignedModule, take_in
from services.executor.kernels.layout import GroupSpec
from services.executor.request import RefusalReason, Refused

Q = SignedModule("model.layers.0.self_attn.q_proj", 2, 1.5, 4, 6)
GROUPS = (
    GroupSpec(name="qkv", in_features=4, out_features=(6, 2), paths=((Q.path, "model.layers.0.self_attn.k_proj"),)),
)


def pack(tensors: dict[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def tensors(module: SignedModule = Q) -> dict[str, np.ndarray]:
    a = np.arange(module.rank * module.in_features, dtype="f4").reshape(module.rank, module.in_features)
    b = np.arange(module.out_features * module.rank, dtype="f4").reshape(module.out_features, module.rank)
    prefix = f"base_model.model.{module.path}"
    return {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}


def take(data: bytes, modules: tuple[SignedModule, ...] = (Q,), signed: bytes | None = None) -> HostAdapter:
    signed = data if signed is None else signed
    return take_in(
        bytearray(data),
        revision_id="sha256:" + "1" * 64,
        weights_digest=sha256_digest(signed),
        weights_size=len(signed),
        modules=modules,
    )


def reason(data: bytes, modules: tuple[SignedModule, ...] = (Q,), signed: bytes | None = None) -> RefusalReason:
    with pytest.raises(Refused) as caught:
        take(data, modules, signed)
    return caught.value.reason


def test_good_bytes_become_views_of_the_same_numbers() -> None:
    adapter = take(pack(tensors()))
    module = adapter.modules[Q.path]
    assert adapter.rank == 2
    assert module.scaling == 1.5
    assert np.frombuffer(module.b.data, "<f4").reshape(6, 2)[5, 1] == 11
    staged = stage(adapter, GROUPS, dtype=torch.float32)
    part = staged.groups["qkv"]
    assert part.a.shape == (1, 2, 2, 4)
    assert torch.equal(part.a[0, :, 0], torch.arange(8.0).view(2, 4))
    assert not part.a[0, :, 1].any()
    assert torch.equal(part.b[0, :, :6], torch.arange(12.0).view(6, 2).t())
    assert part.scale[0, :, 0].tolist() == [1.5, 1.5]
    assert part.scale[0, :, 1].tolist() == [0.0, 0.0]


def test_one_changed_bit_is_refused() -> None:
    data = pack(tensors())
    for position in (0, 20, len(data) - 1):
        bad = bytearray(data)
        bad[position] ^= 1
        assert reason(bytes(bad), signed=data) is RefusalReason.BYTES_DIGEST_MISMATCH
    assert reason(data + b"\0", signed=data) is RefusalReason.BYTES_DIGEST_MISMATCH


def test_tensors_must_be_exactly_those_of_the_signed_table() -> None:
    data = pack(tensors())
    assert reason(data, (replace(Q, rank=3),)) is RefusalReason.BYTES_MALFORMED
    assert reason(data, ()) is RefusalReason.BYTES_MALFORMED
    assert reason(data, (Q, replace(Q, path="other"))) is RefusalReason.BYTES_MALFORMED
    assert reason(pack({**tensors(), "stray": np.zeros((2, 2))})) is RefusalReason.BYTES_MALFORMED


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 64, struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 2**63) + b"{}" * 9]
)
def test_malformed_files_are_refused(data: bytes) -> None:
    assert reason(data) is RefusalReason.BYTES_MALFORMED


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [0, 1])
def test_staging_refuses_a_single_value_that_is_not_finite(value: float, dtype: torch.dtype, which: int) -> None:
    bad = tensors()
    list(bad.values())[which].flat[-1] = value
    with pytest.raises(Refused) as caught:
        stage(take(pack(bad)), GROUPS, dtype=dtype)
    assert caught.value.reason is RefusalReason.ADAPTER_NOT_FINITE


def test_staging_refuses_strange_modules_and_values_that_overflow_in_the_serving_dtype() -> None:
    strange = replace(Q, path="model.layers.9.self_attn.q_proj")
    with pytest.raises(Refused) as caught:
        stage(take(pack(tensors(strange)), (strange,)), GROUPS, dtype=torch.float32)
    assert caught.value.reason is RefusalReason.ADAPTER_UNSUPPORTED
    big = tensors()
    next(iter(big.values()))[0, 0] = 70000.0
    stage(take(pack(big)), GROUPS, dtype=torch.bfloat16)
    with pytest.raises(Refused) as caught:
        stage(take(pack(big)), GROUPS, dtype=torch.float16)
    assert caught.value.reason is RefusalReason.ADAPTER_NOT_FINITE
    wide = replace(Q, out_features=5)
    with pytest.raises(Refused) as caught:
        stage(take(pack(tensors(wide)), (wide,)), GROUPS, dtype=torch.float32)
    assert caught.value.reason is RefusalReason.ADAPTER_UNSUPPORTED


def test_arranging_gives_way_to_the_threads_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    stager = Stager(GROUPS, dtype=torch.float32)
    assert stager(take(pack(tensors()))).rank == Q.rank
    monkeypatch.setattr(staging, "stage", lambda *_, **__: priority())
    assert stager(None) > before or sys.platform != "linux"
    assert priority() == before


@pytest.mark.parametrize("turn", [7, None])
def test_arranging_rests_after_each_layer_while_a_step_is_computed(
    turn: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(staging, "_PIECE_S", 0.0)
    monkeypatch.setattr(staging.time, "sleep", slept.append)
    stager = Stager(GROUPS, dtype=torch.float32, turn=lambda: turn)
    assert stager(take(pack(tensors()))).rank == Q.rank
    assert len(slept) == (sum(group.layers for group in GROUPS) if turn else 0)
