"""A Llama-family checkpoint's config.json, read into what the native decoder computes, or refused with the reason.

Pure: takes the parsed JSON. Anything that would change the numbers and is not implemented is refused. A key that is
missing means what transformers takes it to mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_KINDS = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})


class ConfigUnsupported(Exception):
    """The checkpoint cannot be computed exactly. One line says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a family's class does whatever the config says. `biases` are those of q|k|v, o and the MLP: True, False or
    the name of the key that decides. `windows` is how layers get a sliding window: "none", "all" or "typed"."""

    biases: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    qk_norm: bool = False
    windows: str = "none"
    window_default: int | None = None
    theta: float = 10000.0
    tied: bool = False
    skips_rope: bool = False


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(biases=("attention_bias", "attention_bias", "mlp_bias")),
    "MistralForCausalLM": _Family(windows="all", window_default=4096),
    "Qwen2ForCausalLM": _Family(biases=(True, False, False), windows="typed", window_default=4096),
    "Qwen3ForCausalLM": _Family(
        biases=("attention_bias", "attention_bias", False), qk_norm=True, windows="typed", window_default=4096
    ),
    "SmolLM3ForCausalLM": _Family(
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        windows="typed", theta=2e6, tied=True, skips_rope=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding: its kind, one of ROPE_KINDS, and the numbers that some kinds need; see `rope.py`."""

    kind: str
    theta: float
    original_context: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig:
    """What the native decoder computes. Counts are of heads, layers, features or tokens.

    `windows[layer]` is how many last tokens a layer sees, None for all; `rotary[layer]` says whether it has positions.
    """

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
    rotary: tuple[bool, ...]
    windows: tuple[int | None, ...]
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
        ConfigUnsupported: an architecture outside FAMILIES, or a feature that is not computed exactly.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    _refuse_foreign_features(config)
    heads, layers, hidden = (
        count(config, key) for key in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )  # fmt: skip
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigUnsupported(f"{heads} heads cannot share {kv_heads} key heads of {head_dim} features")
    qkv_bias, o_bias, mlp_bias = (b if isinstance(b, bool) else bool(config.get(b, False)) for b in family.biases)
    rope = read_rope(config, default_theta=family.theta)
    rotary = _rotary(config, family, layers)
    return NativeConfig(
        architecture=architecture,
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=count(config, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        rotary=rotary,
        windows=_windows(config, family, rotary),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        max_context=context_limit(config, rope.kind, rope.original_context),
        eos_ids=eos_ids(config.get("eos_token_id")),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ConfigUnsupported(f"architectures {names} is not one of {', '.join(sorted(FAMILIES))}")
    return str(names[0])


def _refuse_foreign_features(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigUnsupported(f"hidden_act {config['hidden_act']!r}; only silu is computed natively")
    if config.get("quantization_config"):
        raise ConfigUnsupported("quantised checkpoints are not computed")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigUnsupported("partial rotary embedding is not computed natively")


def _rotary(config: Mapping[str, Any], family: _Family, layers: int) -> tuple[bool, ...]:
    if not family.skips_rope:
        return (True,) * layers
    given = config.get("no_rope_layers")
    if given is None:
        interval = int(config.get("no_rope_layer_interval", 4))
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if len(given) < layers:
        raise ConfigUnsupported(f"no_rope_layers has {len(given)} entries for {layers} layers")
    return tuple(bool(flag) for flag in given[:layers])


def _windows(config: Mapping[str, Any], family: _Family, rotary: tuple[bool, ...]) -> tuple[int | None, ...]:
    layers = len(rotary)
    window = config.get("sliding_window", family.window_default)
    if family.windows == "none" or window is None:
        return (None,) * layers
    if family.windows == "all":
        return (int(window),) * layers
    if not config.get("use_sliding_window", False):
        window = None
    types = config.get("layer_types") or _layer_types(config, family, rotary, window)
    if len(types) < layers or set(types) - {FULL, SLIDING} or (window is None and SLIDING in types):
        raise ConfigUnsupported("layer_types does not fit the number of layers, the window or the kinds of attention")
    return tuple(int(window) if kind == SLIDING and window is not None else None for kind in types[:layers])


def _layer_types(config: Mapping[str, Any], family: _Family, rotary: tuple[bool, ...], window: Any) -> list[str]:
    """What transformers makes of a config without layer_types."""
    if window is None:
        return [FULL] * len(rotary)
    if family.skips_rope:
        return [FULL if has_rope else SLIDING for has_rope in rotary]
    first = int(config.get("max_window_layers", 28))
    return [SLIDING if i >= first else FULL for i in range(len(rotary))]


def context_limit(config: Mapping[str, Any], rope_kind: str, original_context: int) -> int:
    """Return the longest context in tokens that is computed exactly, whoever else is in the batch.

    The frequencies of "dynamic" change beyond max_position_embeddings, those of "longrope" beyond the original
    context, and transformers changes them for a whole batch at once: there a row's answer would depend on the others.
    """
    longest = count(config, "max_position_embeddings")
    return min(longest, original_context) if rope_kind == "longrope" else longest


def read_rope(config: Mapping[str, Any], *, default_theta: float) -> Rope:
    """Read the one rotary embedding of a config, from `rope_parameters` or the older `rope_scaling` and `rope_theta`.

    Raises:
        ConfigUnsupported: an unknown kind, a partial embedding, or a number that the kind needs is missing.
    """
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise ConfigUnsupported(f"rope type {kind!r}; computed are {', '.join(sorted(ROPE_KINDS))}")
    if float(given.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigUnsupported("partial rotary embedding is not computed natively")
    longest = count(config, "max_position_embeddings")
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    factor = given.get("factor")
    if factor is None and kind == "longrope":
        factor = longest / int(original or longest)
    missing = [key for key in _NEEDED.get(kind, ()) if given.get(key) is None]
    if missing:
        raise ConfigUnsupported(f"rope type {kind} has no {', '.join(missing)}")
    optional = {key: float(given[key]) for key in _NUMBERS if given.get(key) is not None}
    return Rope(
        kind=kind,
        theta=float(given.get("rope_theta") or config.get("rope_theta") or default_theta),
        original_context=int(original or longest),
        factor=1.0 if factor is None else float(factor),
        truncate=bool(given.get("truncate", True)),
        short_factor=tuple(float(f) for f in given.get("short_factor") or ()),
        **optional,
    )


_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor",),
}
_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def count(config: Mapping[str, Any], key: str) -> int:
    """Return a positive integer of the config. Raises ConfigUnsupported when there is none."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigUnsupported(f"config.json has no usable {key}")
    return value


def eos_ids(value: Any) -> frozenset[int]:
    """Return the ids of an `eos_token_id`: one, a list, or none."""
    if value is None:
        return frozenset()
    return frozenset(int(v) for v in (value if isinstance(value, list) else [value]))
