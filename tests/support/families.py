"""Tiny random checkpoints of many model families, written as transformers writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

WINDOW = 12
SHAPE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """`config` names a class of transformers; `native` says whether our own decoder computes it too."""

    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    native: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return ("native", "transformers") if self.native else ("transformers",)


_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
FAMILIES = {
    "llama": Family("LlamaConfig", native=True),
    "llama-biases-odd-sizes": Family(
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "hidden_size": 84, "head_dim": 18, "num_attention_heads": 6,
         "num_key_value_heads": 3, "intermediate_size": 101, "vocab_size": 163},
        native=True,
    ),
    "llama-one-key-head-tied": Family("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}, native=True),
    "mistral-window": Family("MistralConfig", {"sliding_window": WINDOW, "head_dim": 20}, native=True),
    "qwen2": Family("Qwen2Config", {"tie_word_embeddings": True}, native=True),
    "qwen2-window": Family(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, native=True
    ),
    "qwen3": Family("Qwen3Config", {"head_dim": 16, "attention_bias": True}, native=True),
    "smollm3": Family("SmolLM3Config", {"no_rope_layer_interval": 2}, native=True),
    "gemma2": Family(
        "Gemma2Config",
        {**_GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 9.0, "tie_word_embeddings": True},
    ),
    "gemma3": Family("Gemma3TextConfig", {**_GEMMA, "sliding_window_pattern": 2, "tie_word_embeddings": True}),
    "phi3": Family("Phi3Config", {"sliding_window": WINDOW}),
    "olmo2": Family("Olmo2Config"),
    "granite": Family(
        "GraniteConfig",
        {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2},
    ),
    "cohere": Family("CohereConfig", {"use_qk_norm": True, "logit_scale": 0.5, "tie_word_embeddings": True}),
    "gpt-neox": Family("GPTNeoXConfig", {"num_key_value_heads": None, "rotary_pct": 0.5}),
    "phi": Family("PhiConfig", {"partial_rotary_factor": 0.5}),
}  # fmt: skip
BOTH = [(name, path) for name, family in FAMILIES.items() for path in family.paths]


def make_family(folder: Path, name: str, *, seed: int = 11, **changes: Any) -> PreTrainedModel:
    """Write a random checkpoint of the family to `folder`; return it as transformers loads it, fp32, eager."""
    family = FAMILIES[name]
    values = {key: value for key, value in {**SHAPE, **family.changes, **changes}.items() if value is not None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, family.config)(**values), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                # Gemma's norms multiply by 1 + weight, the others by weight.
                low = -0.5 if name.startswith("gemma") else 0.5
                parameter.uniform_(low, low + 1.0)
            elif key.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def linears(model: PreTrainedModel) -> list[str]:
    """The last names of all linears but the output head, as `target_modules` takes them."""
    head = model.get_output_embeddings()
    return sorted(
        {
            path.rpartition(".")[2]
            for path, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
    )
