"""Which of the two decoders computes a checkpoint, decided from its config.json alone, or why neither does.

    native         the Llama family (`config.py`): our own compact decoder, the fast path
    transformers   any other decoder whose linears are nn.Linear: Hugging Face's modelling code (`hf.py`)

What the config cannot tell (which modules there are, whether attention can be replaced, whether the packed
path computes the same numbers) is checked by `hf_check.py` before the executor serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from services.executor.model.config import FULL, SLIDING, ConfigUnsupported, read_config

NATIVE, TRANSFORMERS = "native", "transformers"
Wanted = Literal["auto", "native", "transformers"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_RECURRENT = (
    "mamba_d_state", "mamba_d_conv", "mamba_expand", "ssm_cfg", "ssm_state_size", "state_size", "time_step_rank",
    "lru_width", "attention_hidden_size", "mlstm_round_up_to_multiple_of", "linear_num_value_heads", "conv_L_cache",
)  # fmt: skip
_OTHER_MODALITIES = ("vision_config", "audio_config", "text_config", "thinker_config", "language_config")
_CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt"})


@dataclass(frozen=True, slots=True)
class ModelPath:
    """The chosen decoder, NATIVE or TRANSFORMERS, and one line that says why."""

    name: str
    reason: str


def choose_path(config: Mapping[str, Any], *, wanted: Wanted = "auto") -> ModelPath:
    """Choose the decoder for a parsed config.json. `wanted` forces one.

    Raises:
        ConfigUnsupported: the checkpoint is computed by neither, or not by the one that is wanted.
    """
    refuse_foreign(config)
    if wanted == TRANSFORMERS:
        return ModelPath(TRANSFORMERS, "the configuration asks for it")
    try:
        family = read_config(config).architecture
    except ConfigUnsupported as error:
        if wanted == NATIVE:
            raise
        return ModelPath(TRANSFORMERS, str(error))
    return ModelPath(NATIVE, f"{family} is of the Llama family")


def refuse_foreign(config: Mapping[str, Any]) -> None:
    """Raises ConfigUnsupported for what is no decoder of plain linears, with the reason."""
    names = config.get("architectures") or []
    name = str(names[0]) if len(names) == 1 else f"architectures {names!r:.100}"
    if config.get("quantization_config"):
        raise ConfigUnsupported(f"{name} is quantised; only plain float weights are computed")
    if config.get("is_encoder_decoder"):
        raise ConfigUnsupported(f"{name} is an encoder with a decoder; only decoders are served")
    modality = next((key for key in _OTHER_MODALITIES if config.get(key)), None)
    if modality is not None:
        raise ConfigUnsupported(f"{name} wraps a language model ({modality}); only the language model alone is served")
    if len(names) != 1 or not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ConfigUnsupported(f"{name} is no causal language model")
    experts = next((key for key in _EXPERTS if _more_than_one(config.get(key))), None)
    if experts is not None:
        raise ConfigUnsupported(f"{name} is a mixture of experts ({experts}), whose weights are no nn.Linear")
    recurrent = next((key for key in _RECURRENT if config.get(key)), None)
    if recurrent is not None:
        raise ConfigUnsupported(f"{name} has layers with a recurrent state ({recurrent}); only attention has a cache")
    if config.get("model_type") in _CONV1D:
        raise ConfigUnsupported(f"{name} has Conv1D layers, whose weights are transposed, instead of nn.Linear")
    if config.get("use_bidirectional_attention"):
        raise ConfigUnsupported(f"{name} attends in both directions; only causal attention is computed")
    strange = sorted(set(config.get("layer_types") or ()) - {FULL, SLIDING})
    if strange:
        raise ConfigUnsupported(f"{name} has layers of kind {', '.join(strange)}; computed are {FULL} and {SLIDING}")


def _more_than_one(value: Any) -> bool:
    if isinstance(value, list):
        return any(_more_than_one(item) for item in value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
