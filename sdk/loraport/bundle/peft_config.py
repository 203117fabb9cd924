"""Reads adapter_config.json: the keys of a PEFT LoRA config, each with the one rule that admits it.

PEFT itself fills gaps with defaults, drops what it does not know and imports code that a config
names. Here nothing is guessed and nothing is dropped: a key is either checked by its rule, or it is
a violation. The result holds only what the meaning of the tensors depends on.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraport.bundle.canonical import StrictJsonError, load_strict
from loraport.bundle.verdict import Limits, Violation

MAX_DEPTH = 16
MAX_LAYER_NAMES = 16
_TASK_TYPES = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_INITS = ("gaussian", "eva", "orthogonal", "mica")
# These subtract the initial B @ A from the base's weights, so the saved tensors fit another base.
_MUTATING_INIT = re.compile(r"pissa(_niter_\d+)?|olora|corda|loftq|lora_ga")
_LITERAL_NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")

# Without these, or with a wrong one, the table of modules would be a guess.
_NEEDED = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    }
)  # fmt: skip
_BLOCKING = frozenset({"NON_LITERAL_PATTERN", "UNSUPPORTED_FORMAT"})

Rule = Callable[[str, Any], Violation | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The part of a config that gives the tensors their meaning.

    `target_modules` is a tuple of literal names, the text of a pattern, or None. The patterns are
    in the order of the file. `layers_to_transform` is None when every layer is meant.
    """

    rank: int
    alpha: int | float
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, int | float]
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: frozenset[int] | None = None
    layers_pattern: tuple[str, ...] = ()


def parse_config(data: bytes, *, limits: Limits) -> tuple[PeftConfig | None, tuple[Violation, ...]]:
    """Reads a config.

    Returns every violation, and the config as far as the tensors can be checked against it: None
    when a key is missing or malformed without which that would be a guess.
    """
    if not data:
        return None, (Violation("EMPTY_FILE", "adapter_config.json has no bytes", "adapter_config.json"),)
    try:
        value = load_strict(
            data, max_bytes=limits.max_config_bytes, max_depth=MAX_DEPTH, allow_floats=True, wide_integers=True
        )
    except StrictJsonError as error:
        return None, (Violation(f"CONFIG_{error.code}", error.detail, error.subject[:300]),)
    if not isinstance(value, dict):
        return None, (Violation("CONFIG_NOT_OBJECT", "the config must be a JSON object"),)
    violations = [*_check_kind(value), *_check_keys(value), *_check_together(value)]
    for key in ("r", "lora_alpha"):
        if key not in value:
            violations.append(Violation("CONFIG_MISSING_KEY", f"{key} is missing; a default is not guessed", key))
    ranks = [value.get("r"), *_values(value.get("rank_pattern"))]
    if any(type(rank) is int and rank > limits.max_rank for rank in ranks):
        detail = f"rank {max(rank for rank in ranks if type(rank) is int)} is above {limits.max_rank}"
        violations.append(Violation("RANK_LIMIT", detail))
    readable = not any(violation.subject in _NEEDED or violation.code in _BLOCKING for violation in violations)
    return _build(value) if readable else None, tuple(violations)


def _check_kind(value: dict[str, Any]) -> list[Violation]:
    if "peft_type" not in value:
        if "fine_tune_type" in value or "lora_parameters" in value:
            detail = "this is a config of MLX: its tensors are transposed and its scale is another number"
            return [Violation("UNSUPPORTED_FORMAT", detail), _missing("peft_type")]
        return [_missing("peft_type")]
    if value["peft_type"] != "LORA":
        detail = f"peft_type is {value['peft_type']!r:.80}, only LORA is served"
        return [Violation("UNSUPPORTED_PEFT_TYPE", detail, "peft_type")]
    return []


def _missing(key: str) -> Violation:
    return Violation("CONFIG_MISSING_KEY", f"{key} is missing", key)


def _check_keys(value: dict[str, Any]) -> list[Violation]:
    violations = []
    for key, item in value.items():
        rule = _RULES.get(key)
        found = rule(key, item) if rule else Violation("CONFIG_UNKNOWN_KEY", f"unknown key {key!r:.100}", key[:300])
        if found is not None:
            violations.append(found)
    return violations


def _check_together(value: dict[str, Any]) -> list[Violation]:
    layers, pattern = value.get("layers_to_transform"), value.get("layers_pattern")
    if isinstance(value.get("target_modules"), str) and (layers is not None or pattern is not None):
        detail = "layers_to_transform and layers_pattern need a list of target_modules"
        return [Violation("CONFIG_CONFLICT", detail, "layers_to_transform")]
    if pattern and layers is None:
        return [Violation("CONFIG_CONFLICT", "layers_pattern needs layers_to_transform", "layers_pattern")]
    return []


def _build(value: dict[str, Any]) -> PeftConfig:
    target, exclude = value.get("target_modules"), value.get("exclude_modules")
    layers, pattern = value.get("layers_to_transform"), value.get("layers_pattern")
    return PeftConfig(
        rank=value["r"],
        alpha=value["lora_alpha"],
        use_rslora=value.get("use_rslora", False),
        fan_in_fan_out=value.get("fan_in_fan_out", False),
        rank_pattern=value.get("rank_pattern") or {},
        alpha_pattern=value.get("alpha_pattern") or {},
        target_modules=tuple(target) if isinstance(target, list) else target,
        exclude_modules=tuple(exclude) if isinstance(exclude, list) else exclude or (),
        # PEFT takes an empty list for "no filter".
        layers_to_transform=frozenset([layers] if isinstance(layers, int) else layers)
        if layers not in (None, [])
        else None,
        layers_pattern=(pattern,) if isinstance(pattern, str) and pattern else tuple(pattern or ()),
    )


# ---------------------------------------------------------------- rules, one per key


def _wrong(key: str, wanted: str) -> Violation:
    return Violation("CONFIG_WRONG_TYPE", f"{key} must be {wanted}", key)


def _bad(key: str, detail: str) -> Violation:
    return Violation("CONFIG_BAD_VALUE", f"{key} {detail}", key)


def _boolean(key: str, value: Any) -> Violation | None:
    return None if isinstance(value, bool) else _wrong(key, "true or false")


def _text_or_null(key: str, value: Any) -> Violation | None:
    return None if value is None or isinstance(value, str) else _wrong(key, "text or null")


def _object_or_null(key: str, value: Any) -> Violation | None:
    return None if value is None or isinstance(value, dict) else _wrong(key, "an object or null")


def _anything(key: str, value: Any) -> Violation | None:
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _rank(key: str, value: Any) -> Violation | None:
    if type(value) is not int:
        return _wrong(key, "an integer")
    return None if value >= 1 else _bad(key, "must be at least 1")


def _alpha(key: str, value: Any) -> Violation | None:
    if not _is_number(value):
        return _wrong(key, "a number")
    return None if value > 0 and math.isfinite(value) else _bad(key, "must be above 0")


def _dropout(key: str, value: Any) -> Violation | None:
    if not _is_number(value):
        return _wrong(key, "a number")
    return None if 0 <= value <= 1 else _bad(key, "must be from 0 to 1")


def _task_type(key: str, value: Any) -> Violation | None:
    return None if value is None or value in _TASK_TYPES else _bad(key, f"must be null or one of {_TASK_TYPES}")


def _init(key: str, value: Any) -> Violation | None:
    if isinstance(value, bool):
        return None
    if not isinstance(value, str):
        return _wrong(key, "true, false or text")
    if _MUTATING_INIT.fullmatch(value.lower()):
        detail = (
            f"init_lora_weights {value!r:.40} changed the base; save it with path_initial_model_for_weight_conversion"
        )
        return Violation("UNSUPPORTED_INIT", detail, key)
    return None if value in _INITS else _bad(key, f"{value!r:.40} is not a known initialisation")


def _bias(key: str, value: Any) -> Violation | None:
    if value == "none":
        return None
    if value in ("all", "lora_only"):
        return Violation("UNSUPPORTED_BIAS", f"bias is {value!r}, only 'none' is served", key)
    return _bad(key, "must be 'none'")


def _megatron_core(key: str, value: Any) -> Violation | None:
    if value is None or value == "megatron.core":
        return None
    return Violation("UNSUPPORTED_MEGATRON", "megatron_core names a module to import", key)


def _unset(code: str) -> Rule:
    """The rule of a key that must be null, false or empty."""

    def rule(key: str, value: Any) -> Violation | None:
        if value is None or value is False or value in ([], {}):
            return None
        return Violation(code, f"{key} is set, which is not served", key)

    return rule


def _absent(code: str) -> Rule:
    """The rule of a key that no saved config has."""

    def rule(key: str, value: Any) -> Violation | None:
        return Violation(code, f"{key} must not be present", key)

    return rule


def _pattern(check: Rule) -> Rule:
    """The rule of a rank or alpha pattern: literal module names and values that pass `check`."""

    def rule(key: str, value: Any) -> Violation | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            return _wrong(key, "an object")
        for name, item in value.items():
            if not _LITERAL_NAME.fullmatch(name):
                return Violation("NON_LITERAL_PATTERN", f"{key} has the pattern {name!r:.100}", name[:300])
            found = check(f"{key}[{name:.100}]", item)
            if found is not None:
                return Violation(found.code, found.detail, key)
        return None

    return rule


def _names(key: str, value: Any) -> Violation | None:
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        return _wrong(key, "null, text or a list of names")
    return None


def _layers(key: str, value: Any) -> Violation | None:
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in items):
        return _wrong(key, "null, an integer or a list of integers")
    return None if all(item >= 0 for item in items) else _bad(key, "must not be negative")


def _layers_pattern(key: str, value: Any) -> Violation | None:
    items = value if isinstance(value, list) else [] if value in (None, "") else [value]
    if not all(isinstance(item, str) for item in items):
        return _wrong(key, "null, text or a list of names")
    for item in items:
        if not _LITERAL_NAME.fullmatch(item):
            return Violation("NON_LITERAL_PATTERN", f"{key} has the pattern {item!r:.100}", key)
    # Every module's path is searched for each of them.
    return None if len(items) <= MAX_LAYER_NAMES else _bad(key, f"must not have more than {MAX_LAYER_NAMES} names")


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


_RULES: Mapping[str, Rule] = {
    "peft_type": _anything,  # checked first, by _check_kind
    "task_type": _task_type,
    "base_model_name_or_path": _text_or_null,
    "revision": _text_or_null,
    "inference_mode": _boolean,
    "auto_mapping": _unset("UNSUPPORTED_AUTO_MAPPING"),
    "peft_version": _text_or_null,
    "r": _rank,
    "lora_alpha": _alpha,
    "use_rslora": _boolean,
    "rank_pattern": _pattern(_rank),
    "alpha_pattern": _pattern(_alpha),
    "target_modules": _names,
    "exclude_modules": _names,
    "layers_to_transform": _layers,
    "layers_pattern": _layers_pattern,
    "modules_to_save": _unset("UNSUPPORTED_MODULES_TO_SAVE"),
    "bias": _bias,
    "lora_bias": _unset("UNSUPPORTED_LORA_BIAS"),
    "fan_in_fan_out": _boolean,
    "lora_dropout": _dropout,
    "init_lora_weights": _init,
    # These four only steer an initialisation; the mutating ones are refused by name above.
    "loftq_config": _object_or_null,
    "eva_config": _object_or_null,
    "corda_config": _object_or_null,
    "lora_ga_config": _object_or_null,
    "use_dora": _unset("UNSUPPORTED_DORA"),
    "megatron_config": _unset("UNSUPPORTED_MEGATRON"),
    "megatron_core": _megatron_core,
    "trainable_token_indices": _unset("UNSUPPORTED_TOKEN_DELTA"),
    "target_parameters": _unset("UNSUPPORTED_PARAMETERS"),
    "layer_replication": _unset("UNSUPPORTED_LAYER_REPLICATION"),
    "use_qalora": _unset("UNSUPPORTED_QALORA"),
    "qalora_group_size": _anything,  # has no effect without use_qalora
    "alora_invocation_tokens": _unset("UNSUPPORTED_ALORA"),
    "arrow_config": _unset("UNSUPPORTED_ARROW"),
    "velora_config": _unset("UNSUPPORTED_VELORA"),
    "monteclora_config": _unset("UNSUPPORTED_MONTECLORA"),
    "kasa_config": _unset("UNSUPPORTED_KASA"),
    "use_bdlora": _unset("UNSUPPORTED_BDLORA"),
    "ensure_weight_tying": _unset("UNSUPPORTED_WEIGHT_TYING"),
    "runtime_config": _absent("UNSUPPORTED_RUNTIME_CONFIG"),
}
