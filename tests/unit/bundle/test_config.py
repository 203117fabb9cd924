"""One test per key of a PEFT config: what is admitted, and by which name the rest is refused."""

import json
import sys
from typing import Any

import pytest

from loraport.bundle.peft_config import _RULES
from tests.bundle_files import Q0, codes, config, encode, tensors, verify, warned, weights

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": ...}, "CONFIG_MISSING_KEY"),
    ({"peft_type": "LOHA"}, "UNSUPPORTED_PEFT_TYPE"),
    ({"peft_type": "lora"}, "UNSUPPORTED_PEFT_TYPE"),
    ({"peft_type": None}, "UNSUPPORTED_PEFT_TYPE"),
    ({"peft_type": ..., "fine_tune_type": "lora", "lora_parameters": {}}, "UNSUPPORTED_FORMAT"),
    ({"task_type": "CHAT"}, "CONFIG_BAD_VALUE"),
    ({"task_type": ["CAUSAL_LM"]}, "CONFIG_BAD_VALUE"),
    ({"base_model_name_or_path": 1}, "CONFIG_WRONG_TYPE"),
    ({"revision": 1}, "CONFIG_WRONG_TYPE"),
    ({"inference_mode": "true"}, "CONFIG_WRONG_TYPE"),
    ({"auto_mapping": {"parent_library": "os"}}, "UNSUPPORTED_AUTO_MAPPING"),
    ({"peft_version": 0.2}, "CONFIG_WRONG_TYPE"),
    ({"r": ...}, "CONFIG_MISSING_KEY"),
    ({"r": True}, "CONFIG_WRONG_TYPE"),
    ({"r": 2.0}, "CONFIG_WRONG_TYPE"),
    ({"r": "2"}, "CONFIG_WRONG_TYPE"),
    ({"r": 0}, "CONFIG_BAD_VALUE"),
    ({"r": -2}, "CONFIG_BAD_VALUE"),
    ({"r": 257}, "RANK_LIMIT"),
    ({"rank_pattern": {"q_proj": 300}}, "RANK_LIMIT"),
    ({"lora_alpha": ...}, "CONFIG_MISSING_KEY"),
    ({"lora_alpha": None}, "CONFIG_WRONG_TYPE"),
    ({"lora_alpha": True}, "CONFIG_WRONG_TYPE"),
    ({"lora_alpha": "4"}, "CONFIG_WRONG_TYPE"),
    ({"lora_alpha": 0}, "CONFIG_BAD_VALUE"),
    ({"lora_alpha": -1}, "CONFIG_BAD_VALUE"),
    ({"lora_alpha": 130}, "SCALING_LIMIT"),
    ({"lora_alpha": 1e300}, "SCALING_LIMIT"),
    ({"use_rslora": "false"}, "CONFIG_WRONG_TYPE"),
    ({"use_rslora": 1}, "CONFIG_WRONG_TYPE"),
    ({"rank_pattern": []}, "CONFIG_WRONG_TYPE"),
    ({"rank_pattern": {"q_proj": True}}, "CONFIG_WRONG_TYPE"),
    ({"rank_pattern": {"q_proj": 0}}, "CONFIG_BAD_VALUE"),
    ({"rank_pattern": {"(q|v)_proj": 2}}, "NON_LITERAL_PATTERN"),
    ({"rank_pattern": {"((a|a)*b)": 2}}, "NON_LITERAL_PATTERN"),
    ({"rank_pattern": {"^model.layers.0.self_attn.q_proj": 2}}, "NON_LITERAL_PATTERN"),
    ({"alpha_pattern": {"": 2}}, "NON_LITERAL_PATTERN"),
    ({"alpha_pattern": {"q_proj": "2"}}, "CONFIG_WRONG_TYPE"),
    ({"alpha_pattern": {"layers.9.self_attn.q_proj": 2}}, "UNMATCHED_PATTERN"),
    ({"alpha_pattern": {"self_attn.q.proj": 2}}, "UNMATCHED_PATTERN"),
    ({"alpha_pattern": {"q_proj": 8, "layers.0.self_attn.q_proj": 4}}, "AMBIGUOUS_PATTERN"),
    ({"rank_pattern": {"q_proj": 2, "layers.0.self_attn.q_proj": 4}}, "AMBIGUOUS_PATTERN"),
    ({"target_modules": 1}, "CONFIG_WRONG_TYPE"),
    ({"target_modules": [1]}, "CONFIG_WRONG_TYPE"),
    ({"target_modules": ["q_proj"]}, "TARGET_MISMATCH"),
    ({"target_modules": []}, "TARGET_MISMATCH"),
    ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "MISSING_MODULE"),
    ({"exclude_modules": ["q_proj"]}, "TARGET_MISMATCH"),
    ({"exclude_modules": {}}, "CONFIG_WRONG_TYPE"),
    ({"layers_to_transform": [0]}, "TARGET_MISMATCH"),
    ({"layers_to_transform": 1}, "TARGET_MISMATCH"),
    ({"layers_to_transform": [0, 1], "layers_pattern": "blocks"}, "TARGET_MISMATCH"),
    ({"layers_to_transform": "0"}, "CONFIG_WRONG_TYPE"),
    ({"layers_to_transform": [-1]}, "CONFIG_BAD_VALUE"),
    ({"layers_pattern": "layers"}, "CONFIG_CONFLICT"),
    ({"layers_to_transform": [0, 1], "layers_pattern": "(a|a)*"}, "NON_LITERAL_PATTERN"),
    ({"layers_to_transform": [0, 1], "layers_pattern": ["layers"] * 17}, "CONFIG_BAD_VALUE"),
    ({"layers_to_transform": [0, 1], "target_modules": "all-linear"}, "CONFIG_CONFLICT"),
    ({"modules_to_save": ["norm"]}, "UNSUPPORTED_MODULES_TO_SAVE"),
    ({"bias": "all"}, "UNSUPPORTED_BIAS"),
    ({"bias": "lora_only"}, "UNSUPPORTED_BIAS"),
    ({"bias": None}, "CONFIG_BAD_VALUE"),
    ({"lora_bias": True}, "UNSUPPORTED_LORA_BIAS"),
    ({"fan_in_fan_out": True}, "FAN_IN_FAN_OUT_MISMATCH"),
    ({"fan_in_fan_out": None}, "CONFIG_WRONG_TYPE"),
    ({"lora_dropout": 2}, "CONFIG_BAD_VALUE"),
    ({"lora_dropout": None}, "CONFIG_WRONG_TYPE"),
    *(
        ({"init_lora_weights": name}, "UNSUPPORTED_INIT")
        for name in ("pissa", "pissa_niter_16", "PiSSA", "olora", "OLoRA", "corda", "loftq", "lora_ga")
    ),
    ({"init_lora_weights": "magic"}, "CONFIG_BAD_VALUE"),
    ({"init_lora_weights": None}, "CONFIG_WRONG_TYPE"),
    ({"eva_config": "x"}, "CONFIG_WRONG_TYPE"),
    ({"use_dora": True}, "UNSUPPORTED_DORA"),
    ({"use_dora": "false"}, "UNSUPPORTED_DORA"),
    ({"megatron_config": {"a": 1}}, "UNSUPPORTED_MEGATRON"),
    ({"megatron_core": "os"}, "UNSUPPORTED_MEGATRON"),
    ({"trainable_token_indices": [1]}, "UNSUPPORTED_TOKEN_DELTA"),
    ({"target_parameters": ["experts.w"]}, "UNSUPPORTED_PARAMETERS"),
    ({"layer_replication": [[0, 2]]}, "UNSUPPORTED_LAYER_REPLICATION"),
    ({"use_qalora": True}, "UNSUPPORTED_QALORA"),
    ({"alora_invocation_tokens": [1, 2]}, "UNSUPPORTED_ALORA"),
    ({"arrow_config": {"top_k": 2}}, "UNSUPPORTED_ARROW"),
    ({"velora_config": {"a": 1}}, "UNSUPPORTED_VELORA"),
    ({"monteclora_config": {"a": 1}}, "UNSUPPORTED_MONTECLORA"),
    ({"kasa_config": {"a": 1}}, "UNSUPPORTED_KASA"),
    ({"use_bdlora": {"nblocks": 2}}, "UNSUPPORTED_BDLORA"),
    ({"ensure_weight_tying": True}, "UNSUPPORTED_WEIGHT_TYING"),
    ({"runtime_config": None}, "UNSUPPORTED_RUNTIME_CONFIG"),
    ({"some_future_key": None}, "CONFIG_UNKNOWN_KEY"),
    ({"tokenizer_name_or_path": "x"}, "CONFIG_UNKNOWN_KEY"),
]


@pytest.mark.parametrize(("changes", "code"), REFUSED, ids=[f"{row[1]}-{next(iter(row[0]))}" for row in REFUSED])
def test_refused(changes: dict[str, Any], code: str) -> None:
    assert code in codes(verify(config(**changes)))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "EMPTY_FILE"),
        (b"peft_type: LORA\n", "CONFIG_NOT_JSON"),
        (b"[]", "CONFIG_NOT_OBJECT"),
        (b"\xff{}", "CONFIG_NOT_UTF8"),
        (b" " * 70_000, "CONFIG_TOO_LARGE"),
        (b"[" * 5000, "CONFIG_TOO_DEEP"),
        (b'{"r":8,"r":4}', "CONFIG_DUPLICATE_KEY"),
        (b'{"lora_alpha":NaN}', "CONFIG_NON_FINITE_NUMBER"),
        (b'{"lora_alpha":1e400}', "CONFIG_NUMBER_RANGE"),
        (b'{"revision":"\\ud800"}', "CONFIG_LONE_SURROGATE"),
    ],
)
def test_not_strict_json(data: bytes, code: str) -> None:
    assert codes(verify(data)) == {code}


ADMITTED: list[dict[str, Any]] = [
    {},
    {"task_type": None},
    {"base_model_name_or_path": "/etc/passwd"},
    {"base_model_name_or_path": None},
    {"peft_version": ...},
    {"peft_version": "0.22.0.dev0@abc"},
    {"init_lora_weights": False},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
    {"loftq_config": None},
    {"modules_to_save": []},
    {"lora_dropout": 0.05},
    {"lora_alpha": 4.0},
    {"rank_pattern": None, "alpha_pattern": None},
    {"rank_pattern": {"q_proj": 2}},
    {"alpha_pattern": {"q_proj": 8, "self_attn.q_proj": 8.0}},
    {"target_modules": ["self_attn.q_proj", "v_proj"]},
    {"exclude_modules": ["k_proj"]},
    {"layers_to_transform": [0, 1]},
    {"layers_to_transform": [0, 1], "layers_pattern": ["layers"]},
    {"layers_to_transform": []},
    {key: ... for key in config() if key not in ("peft_type", "r", "lora_alpha", "target_modules")},
]


@pytest.mark.parametrize("changes", ADMITTED, ids=lambda changes: "-".join(changes)[:40] or "as saved")
def test_admitted(changes: dict[str, Any]) -> None:
    assert codes(verify(config(**changes))) == set()


def test_every_key_that_peft_saves_has_a_rule() -> None:
    assert set(config()) <= set(_RULES)


@pytest.mark.parametrize("target", ["all-linear", "ALL-LINEAR"])
def test_all_linear_targets_everything_but_the_head(target: str) -> None:
    assert codes(verify(config(target_modules=target))) == set()
    with_head = weights(tensors({Q0: 2, "lm_head": 2}))
    assert codes(verify(config(target_modules=target), with_head)) == {"TARGET_MISMATCH"}


@pytest.mark.parametrize(
    "changes", [{"target_modules": ".*(q|v)_proj"}, {"target_modules": None}, {"exclude_modules": ".*k"}]
)
def test_a_target_pattern_is_not_evaluated(changes: dict[str, Any]) -> None:
    verdict = verify(config(**changes))
    assert codes(verdict) == set()
    assert "TARGET_NOT_CHECKED" in warned(verdict)


def test_a_pattern_for_modules_that_are_not_adapted_is_a_warning() -> None:
    verdict = verify(config(rank_pattern={"down_proj": 8}))
    assert codes(verdict) == set()
    assert warned(verdict) == {"UNUSED_PATTERN"}


def test_all_faults_of_config_and_file_are_listed_together() -> None:
    broken = config(use_dora=True, bias="all", future=1, lora_bias=True)
    values = tensors({Q0: 3})
    found = codes(verify(broken, weights(values)))
    assert found >= {"UNSUPPORTED_DORA", "UNSUPPORTED_BIAS", "CONFIG_UNKNOWN_KEY", "UNSUPPORTED_LORA_BIAS"}
    assert found >= {"RANK_MISMATCH", "MISSING_MODULE"}


def test_nothing_is_imported_for_a_config() -> None:
    before = set(sys.modules)
    verify(config(auto_mapping={"parent_library": "wave"}, megatron_config={"a": 1}, megatron_core="sndhdr"))
    assert set(sys.modules) == before


def test_spacing_and_order_of_the_config_do_not_change_the_revision() -> None:
    shuffled = dict(reversed(config().items())) | {"target_modules": ["v_proj", "q_proj"]}
    ids = {
        verify(data).revision_id
        for data in (encode(config()), json.dumps(shuffled).encode(), json.dumps(config(), indent=8).encode())
    }
    assert len(ids) == 1
