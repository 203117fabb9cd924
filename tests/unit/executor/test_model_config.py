"""What the native decoder reads out of a config.json equals what transformers makes of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.executor.model.config import ConfigUnsupported, read_config
from services.executor.model.rope import angular_speeds

BARE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "sliding_window": 4}),
    ("Llama", {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}),
    ("Llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    ("Mistral", {}),
    ("Mistral", {"sliding_window": None}),
    ("Mistral", {"sliding_window": 8, "attention_bias": True}),
    ("Qwen2", {"sliding_window": 8}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 8,
               "layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("SmolLM3", {}),
    ("SmolLM3", {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(CASES)])
def test_keys_that_are_missing_or_old_mean_what_transformers_takes_them_to_mean(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    raw = {**BARE, **changes, "architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = read_config(raw)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    speeds, gain = angular_speeds(ours.rope, ours.head_dim)
    rotary = type(model.model.rotary_emb)(model.config)  # off the meta device
    assert torch.equal(speeds, rotary.inv_freq)
    assert gain == rotary.attention_scaling
    layers = model.model.layers
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    if family == "Mistral":
        windows = [model.config.sliding_window] * len(layers)
    assert list(ours.windows) == windows
    assert list(ours.rotary) == [bool(getattr(layer.self_attn, "use_rope", True)) for layer in layers]
    first = layers[0]
    biases = [first.self_attn.q_proj.bias, first.self_attn.o_proj.bias, first.mlp.up_proj.bias]
    assert [ours.qkv_bias, ours.o_bias, ours.mlp_bias] == [bias is not None for bias in biases]
    assert ours.qk_norm == hasattr(first.self_attn, "q_norm")
    assert ours.tied == model.config.tie_word_embeddings
    assert ours.norm_eps == first.input_layernorm.variance_epsilon


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 3}, "cannot share"),
        ({"head_dim": 7}, "cannot share"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "has no short_factor"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ],
)
def test_configs_that_do_not_add_up(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigUnsupported, match=reason):
        read_config({**BARE, "architectures": ["LlamaForCausalLM"], **changes})
