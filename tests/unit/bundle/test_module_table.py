"""Tensor names, shapes, ranks and scales: what becomes a row of the table, and what is an offender."""

import math

import numpy as np
import pytest

from loraport.bundle.verdict import Limits
from tests.bundle_files import (
    HIDDEN,
    Q0,
    Q1,
    V0,
    V1,
    VOCAB,
    a_name,
    b_name,
    codes,
    config,
    entries,
    pack,
    small_base,
    tensors,
    verify,
    weights,
)


def renamed(old: str, new: str) -> bytes:
    return weights({new if name == old else name: value for name, value in tensors().items()})


def changed(name: str, shape: tuple[int, ...]) -> bytes:
    return weights({**tensors(), name: np.ones(shape, np.float32)})


def added(name: str, shape: tuple[int, ...] = (2, 2)) -> bytes:
    return changed(name, shape)


def test_the_table_of_a_plain_adapter() -> None:
    verdict = verify()
    assert codes(verdict) == set()
    assert [module.path for module in verdict.modules] == sorted([Q0, V0, Q1, V1])
    first = verdict.modules[0]
    assert (first.path, first.rank, first.alpha, first.scaling) == (Q0, 2, "4", 2.0)
    assert (first.in_features, first.out_features, first.a_name, first.b_name) == (
        HIDDEN,
        HIDDEN,
        a_name(Q0),
        b_name(Q0),
    )
    assert verdict.dtype == "F32"


def test_the_worked_example_of_patterns() -> None:
    ranks = {Q0: 8, V0: 8, Q1: 4, V1: 8}
    patterns = config(r=8, lora_alpha=16, rank_pattern={"layers.1.self_attn.q_proj": 4}, alpha_pattern={"q_proj": 32})
    plain = verify(patterns, weights(tensors(ranks)))
    assert {module.path: module.scaling for module in plain.modules} == {Q0: 4.0, V0: 2.0, Q1: 8.0, V1: 2.0}
    stabilized = verify({**patterns, "use_rslora": True}, weights(tensors(ranks)))
    found = {module.path: module.scaling for module in stabilized.modules}
    assert found == {Q0: 32 / math.sqrt(8), V0: 16 / math.sqrt(8), Q1: 16.0, V1: 16 / math.sqrt(8)}


@pytest.mark.parametrize(
    ("content", "code", "offender"),
    [
        (renamed(a_name(Q0), a_name(Q0).replace("q_proj", "q_porj")), "UNKNOWN_TENSOR", "q_porj"),
        (renamed(a_name(Q0), a_name(Q0).replace("layers.0", "layers.99")), "UNKNOWN_TENSOR", "layers.99"),
        (renamed(a_name(Q0), a_name(Q0).removeprefix("base_model.model.")), "UNKNOWN_TENSOR", "prefix"),
        (renamed(a_name(Q0), "base_model.model." + a_name(Q0)), "UNKNOWN_TENSOR", "doubled"),
        (renamed(a_name(Q0), a_name(Q0).replace(".weight", ".default.weight")), "UNKNOWN_TENSOR", "adapter's name"),
        (renamed(a_name(Q0), a_name(Q0).replace("model.layers", "_orig_mod.model.layers")), "UNKNOWN_TENSOR", "_orig_mod"),
        (renamed(a_name(Q0), a_name(Q0).replace("model.layers", "model.language_model.layers")), "UNKNOWN_TENSOR", "language"),
        (added("optimizer.state"), "UNKNOWN_TENSOR", "optimizer.state"),
        (added("base_model.model.lm_head.weight"), "UNSUPPORTED_FULL_WEIGHT", "lm_head"),
        (added(f"base_model.model.{Q0}.lora_magnitude_vector"), "UNSUPPORTED_DORA", Q0),
        (added(f"base_model.model.{Q0}.lora_B.bias"), "UNSUPPORTED_LORA_BIAS", Q0),
        (added(f"base_model.model.{Q0}.base_layer.bias"), "UNSUPPORTED_BIAS", Q0),
        (added("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"), "UNSUPPORTED_TOKEN_DELTA", "delta"),
        (added("base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"), "UNSUPPORTED_PARAMETERS", "experts"),
        (added(f"base_model.model.{Q0}.lora_diag"), "UNSUPPORTED_KASA", Q0),
        (added("lora_unet_down.lora_down.weight"), "UNSUPPORTED_FORMAT", "kohya"),
        (added("model.layers.0.self_attn.q_proj.lora_a"), "UNSUPPORTED_FORMAT", "MLX"),
        (added("base_model.model.model.embed_tokens.lora_A.weight"), "UNKNOWN_TENSOR", "embedding"),
        (added("base_model.model.model.norm.lora_A.weight"), "UNKNOWN_TENSOR", "norm"),
        (changed(a_name(Q0), (2, 24)), "SHAPE_MISMATCH", a_name(Q0)),
        (changed(b_name(V1), (9, 2)), "SHAPE_MISMATCH", b_name(V1)),
        (changed(a_name(Q0), (32,)), "SHAPE_MISMATCH", a_name(Q0)),
        (changed(a_name(Q0), (2, 16, 1)), "SHAPE_MISMATCH", a_name(Q0)),
        (changed(a_name(Q0), (16, 2)), "SHAPE_MISMATCH", a_name(Q0)),
        (changed(a_name(Q0), (3, 16)), "RANK_MISMATCH", a_name(Q0)),
        (weights(tensors({Q0: 3, V0: 2, Q1: 2, V1: 2})), "RANK_MISMATCH", a_name(Q0)),
    ],
)  # fmt: skip
def test_offenders_are_named(content: bytes, code: str, offender: str) -> None:
    verdict = verify(content=content)
    assert code in codes(verdict)
    assert any(offender in found.detail for found in verdict.violations if found.code == code), verdict.violations


def test_every_offender_is_listed() -> None:
    values = tensors()
    odd = [a_name(f"model.layers.{layer}.self_attn.q_proj") for layer in range(2, 30)]
    verdict = verify(content=weights(values | {name: np.ones((2, 16), np.float32) for name in odd}))
    assert {found.subject for found in verdict.violations if found.code == "UNKNOWN_TENSOR"} == set(odd)


@pytest.mark.parametrize("dropped", [a_name(Q0), b_name(Q0)])
def test_half_a_pair(dropped: str) -> None:
    verdict = verify(content=weights({name: value for name, value in tensors().items() if name != dropped}))
    assert "INCOMPLETE_PAIR" in codes(verdict)


def test_an_adapter_of_another_base() -> None:
    wide = {
        name: np.ones([d * 2 if d > 2 else d for d in value.shape], np.float32) for name, value in tensors().items()
    }
    assert {"SHAPE_MISMATCH", "WRONG_BASE_SHAPE"} <= codes(verify(content=weights(wide)))
    one_wrong = verify(content=changed(a_name(Q0), (2, 24)))
    assert "WRONG_BASE_SHAPE" not in codes(one_wrong)


def test_an_output_head_of_its_own_can_be_adapted() -> None:
    head = weights(tensors({"lm_head": 2}))
    settings = config(target_modules=["lm_head"])
    assert [module.path for module in verify(settings, head).modules] == ["lm_head"]
    assert "UNSUPPORTED_TIED_HEAD" in codes(verify(settings, head, base=small_base(tied=True)))


def test_an_embedding_is_a_module_unless_the_limits_leave_it_out() -> None:
    prefix = "base_model.model.model.embed_tokens.lora_embedding_"
    values = {prefix + "A": np.ones((2, VOCAB), np.float32), prefix + "B": np.ones((HIDDEN, 2), np.float32)}
    settings = config(target_modules=["embed_tokens"])
    linear_only = Limits(supported_kinds=frozenset({"linear"}))
    assert codes(verify(settings, weights(values), limits=linear_only)) == {"UNSUPPORTED_MODULE"}
    row = verify(settings, weights(values)).modules[0]
    assert (row.path, row.in_features, row.out_features) == ("model.embed_tokens", VOCAB, HIDDEN)
    # PEFT's all-linear takes no embedding, and would leave these tensors unread.
    assert "TARGET_MISMATCH" in codes(verify(config(target_modules="all-linear"), weights(values)))
    grown = {**values, prefix + "A": np.ones((2, VOCAB + 1), np.float32)}
    assert "SHAPE_MISMATCH" in codes(verify(settings, weights(grown)))


def test_a_base_with_transposed_weights_needs_the_flag() -> None:
    transposed = small_base(fan_in_fan_out=True)
    assert codes(verify(base=transposed)) == {"FAN_IN_FAN_OUT_MISMATCH"}
    assert codes(verify(config(fan_in_fan_out=True), base=transposed)) == set()


def test_tensors_of_two_dtypes() -> None:
    header, data = entries(tensors(), "F16")
    last = list(header)[-1]
    begin, end = header[last]["data_offsets"]
    header[last] = {"dtype": "F32", "shape": [4, 2], "data_offsets": [begin, end]}
    assert "MIXED_DTYPE" in codes(verify(content=pack(header, data)))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_three_dtypes(dtype: str) -> None:
    verdict = verify(content=weights(dtype=dtype))
    assert codes(verdict) == set()
    assert verdict.dtype == dtype


def test_rank_limit_of_the_file() -> None:
    assert "RANK_LIMIT" in codes(verify(limits=Limits(max_rank=1)))
    wide = weights(tensors({Q0: 300}))
    assert "RANK_LIMIT" in codes(verify(config(), wide))
