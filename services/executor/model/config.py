"""A Llama-family checkpoint's config.json, read into what the native decoder computes, or refused with the reason.

Pure: takes the parsed JSON. Anything that would change the numbers and is not implemented is refused at start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_ROPE_KINDS = frozenset({"default", "linear", "llama3"})


class ConfigUnsupported(Exception):
    """The native decoder cannot compute this checkpoint exactly. One line says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding. `kind` is "default", "linear" or "llama3"; the rest are that kind's own numbers."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Return head_dim / 2 angular speeds, radians per position."""
        plain = [self.theta ** -(i / head_dim) for i in range(0, head_dim, 2)]
        if self.kind == "linear":
            return [f / self.factor for f in plain]
        if self.kind == "llama3":
            return [self._llama3(f) for f in plain]
        return plain

    def _llama3(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_context / self.high_freq_factor:
            return frequency
        if wavelength > self.original_context / self.low_freq_factor:
            return frequency / self.factor
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.original_context / wavelength - self.low_freq_factor) / span
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig:
    """What the native decoder computes. Counts are of heads, layers, features or tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_context: int
    eos_ids: frozenset[int]


def read_config(config: Mapping[str, Any]) -> NativeConfig:
    """Read a parsed config.json.

    Raises:
        ConfigUnsupported: an architecture outside FAMILY, or a feature that is not computed exactly.
    """
    architecture = _architecture(config)
    _refuse_foreign_features(config)
    heads = _count(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    hidden = _count(config, "hidden_size")
    head_dim = int(config.get("head_dim") or hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigUnsupported(f"{heads} heads cannot share {kv_heads} key heads of {head_dim} features")
    attention_bias = bool(config.get("attention_bias", False)) and architecture != "MistralForCausalLM"
    qwen2 = architecture == "Qwen2ForCausalLM"
    return NativeConfig(
        architecture=architecture,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        max_context=_max_context(config, architecture),
        eos_ids=_eos_ids(config.get("eos_token_id")),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILY:
        raise ConfigUnsupported(f"architectures {names} is not one of {', '.join(sorted(FAMILY))}")
    return str(names[0])


def _refuse_foreign_features(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigUnsupported(f"hidden_act {config['hidden_act']!r}; only silu is computed")
    if config.get("quantization_config"):
        raise ConfigUnsupported("quantised checkpoints are not computed natively")
    if float(config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigUnsupported("partial rotary embedding is not computed natively")
    kinds = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or kinds - {"full_attention", "sliding_attention"}:
        raise ConfigUnsupported("layers that mix full and windowed attention are not computed natively")


def _max_context(config: Mapping[str, Any], architecture: str) -> int:
    """Within its window, sliding attention is full attention: a windowed Mistral is exact up to the window."""
    longest = _count(config, "max_position_embeddings")
    window = config.get("sliding_window")
    windowed = architecture == "MistralForCausalLM" or "sliding_attention" in (config.get("layer_types") or [])
    return min(longest, int(window)) if window and windowed else longest


def _rope(config: Mapping[str, Any]) -> Rope:
    old = config.get("rope_scaling") or {}
    new = config.get("rope_parameters") or {}
    given = {**old, **new}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in _ROPE_KINDS:
        raise ConfigUnsupported(f"rope type {kind!r}; computed are {', '.join(sorted(_ROPE_KINDS))}")
    if float(given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigUnsupported("partial rotary embedding is not computed natively")
    return Rope(
        kind=kind,
        theta=float(given.get("rope_theta") or config.get("rope_theta") or 10000.0),
        factor=float(given.get("factor", 1.0)),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        original_context=int(given.get("original_max_position_embeddings", 8192)),
    )


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigUnsupported(f"config.json has no usable {key}")
    return value


def _eos_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(v) for v in (value if isinstance(value, list) else [value]))
