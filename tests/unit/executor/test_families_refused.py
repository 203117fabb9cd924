"""Checkpoints that neither decoder computes exactly are refused at start, in one line that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from services.executor.model.config import ConfigUnsupported
from services.executor.model.families import choose_path
from services.executor.model.hf_check import check_structure
from services.executor.model.interface import ModelUnsupported
from services.executor.model.load import load_decoder
from tests.support.families import SHAPE, make_family

FOREIGN: dict[str, tuple[str, dict[str, Any], str]] = {
    "fused experts": ("MixtralConfig", {}, "mixture of experts"),
    "routed experts": ("OlmoeConfig", {"num_experts": 4}, "mixture of experts"),
    "encoder-decoder": ("T5Config", {"d_model": 48, "num_layers": 1, "d_kv": 8, "d_ff": 64}, "encoder"),
    "state space": ("MambaConfig", {"state_size": 4}, "recurrent state"),
    "recurrent and attention": ("RecurrentGemmaConfig", {"lru_width": 48}, "recurrent state"),
    "convolutions": ("Lfm2Config", {}, "recurrent state"),
    "Conv1D": ("GPT2Config", {"n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 64}, "Conv1D"),
    "attention of its own": ("StableLmConfig", {}, "its own attention"),
    "attention in two halves": ("DiffLlamaConfig", {}, "exactly once"),
    "unequal keys and values": ("MiniCPM3Config", {}, "cannot run it packed"),
    "both directions": ("Gemma3TextConfig", {"head_dim": 16, "use_bidirectional_attention": True}, "both directions"),
}


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_foreign_architectures(tmp_path: Path, name: str) -> None:
    kind, changes, reason = FOREIGN[name]
    config = getattr(transformers, kind)(**{**SHAPE, **changes})
    auto = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    getattr(transformers, auto).from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=reason) as refusal:
        load_decoder(tmp_path, dtype=torch.float32)
    assert "\n" not in str(refusal.value)


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"x": 1}}, "vision_config"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"x": 1}}, "text_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "no causal language model"),
        ({"architectures": []}, "no causal language model"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_configs_that_no_decoder_computes(changes: dict[str, Any], reason: str) -> None:
    for wanted in ("auto", "native", "transformers"):
        with pytest.raises(ConfigUnsupported, match=reason):
            choose_path({**LLAMA, **changes}, wanted=wanted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "of the Llama family"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope type 'axial'"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "is not one of"),
    ],
)
def test_the_table_sends_the_rest_to_transformers_and_says_why(changes: dict[str, Any], reason: str) -> None:
    config = {**LLAMA, **changes}
    path = choose_path(config)
    assert (path.name, reason in path.reason) == ("transformers" if changes else "native", True)
    assert choose_path(config, wanted="transformers").name == "transformers"
    if changes:
        with pytest.raises(ConfigUnsupported, match=reason):
            choose_path(config, wanted="native")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_weights_that_do_not_fit_the_config(tmp_path: Path, name: str, fault: str) -> None:
    """Modelling code would fill a gap with random numbers and ignore what it does not know, with a warning."""
    make_family(tmp_path, name)
    file, key = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    if fault == "missing":
        del tensors[key]
    elif fault == "extra":
        tensors["model.layers.1.mlp.side_proj.weight"] = tensors[key].clone()
    else:
        tensors[key] = tensors[key][:-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match="side_proj" if fault == "extra" else "up_proj"):
        load_decoder(tmp_path, dtype=torch.float32)


def test_only_pickled_weights_are_no_weights(tmp_path: Path) -> None:
    make_family(tmp_path, "gemma3")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="safetensors"):
        load_decoder(tmp_path, dtype=torch.float32)


def test_code_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    make_family(tmp_path, "gemma3")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelUnsupported):
        load_decoder(tmp_path, dtype=torch.float32)
    assert not (tmp_path / "ran").exists()


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(2, 3, 4))


class _Odd(nn.Linear):
    """A linear that computes something of its own."""


@pytest.mark.parametrize(("part", "reason"), [(_Experts(), "_Experts with weights"), (_Odd(2, 2), "is a _Odd")])
def test_matrices_that_are_no_plain_linear_are_found_in_the_modules(part: nn.Module, reason: str) -> None:
    class Causal(nn.Module):
        base_model_prefix = "model"
        _supports_attention_backend = True

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), part)

    with pytest.raises(ModelUnsupported, match=reason):
        check_structure(Causal())
