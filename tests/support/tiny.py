"""Tiny random bases and real PEFT adapters for engine tests. Everything is seeded and made in seconds."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from loraport.bundle.digest import sha256_digest
from services.executor.intake import HostAdapter, SignedModule, take_in

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def make_base(folder: Path, kind: str = "llama", seed: int = 7, **changes: Any) -> PreTrainedModel:
    """Write a random base to `folder` and return it as transformers loads it, fp32, eager attention."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**{**SHAPE, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_adapter(base: PreTrainedModel, folder: Path, *, seed: int, gain: float = 0.5, **lora: Any) -> None:
    """Save a random adapter through PEFT; each module's update has `gain` times the norm of its base weight."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **lora))
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, LoraLayer):
                    a, b = factors(module)
                    a.normal_(0, a.shape[1] ** -0.5)
                    b.normal_()
                    b *= gain * module.get_base_layer().weight.norm() / (module.scaling["default"] * (b @ a)).norm()
        model.save_pretrained(folder, save_embedding_layers=False)


def factors(module: LoraLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of an adapted linear or embedding."""
    if "default" in module.lora_embedding_A:
        return module.lora_embedding_A["default"], module.lora_embedding_B["default"]
    return module.lora_A["default"].weight, module.lora_B["default"].weight


def with_adapter(base: PreTrainedModel, folder: Path) -> Any:
    """Return `base` under PEFT with the adapter in `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()


@torch.no_grad()
def greedy(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy continuation, the whole sequence computed afresh at every step; stops at token 2, which is not part of it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = int(logits.argmax())
        if best == 2:
            break
        ids.append(best)
    return ids[len(prompt) :]


@dataclass(frozen=True)
class Bundle:
    """An adapter's bytes and signed facts, as an executor gets them."""

    revision_id: str
    weights: bytes
    modules: tuple[SignedModule, ...]

    def host(self) -> HostAdapter:
        return take_in(
            bytearray(self.weights),
            revision_id=self.revision_id,
            weights_digest=sha256_digest(self.weights),
            weights_size=len(self.weights),
            modules=self.modules,
        )


def read_bundle(base: PreTrainedModel, folder: Path) -> Bundle:
    """Return the saved adapter with the module table that PEFT itself resolves."""
    model = with_adapter(base, folder)
    modules = []
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            a, b = factors(module)
            path = name.removeprefix("base_model.model.")
            modules.append(SignedModule(path, a.shape[0], module.scaling["default"], a.shape[1], b.shape[0]))
    weights = (folder / "adapter_model.safetensors").read_bytes()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    return Bundle(sha256_digest(weights + folder.name.encode()), weights, tuple(sorted(modules, key=lambda m: m.path)))


def prompt_of(length: int, salt: int = 0, vocab: int = 256) -> tuple[int, ...]:
    """A fixed made-up prompt without special tokens."""
    return tuple(3 + (11 * i * i + 29 * i + 17 * length + 7 * salt) % (vocab - 3) for i in range(length))
