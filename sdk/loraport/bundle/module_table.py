"""From tensor names and shapes to the table of adapted modules, checked against base and config.

The file is the truth about which modules are adapted; the base says which modules exist and how
large they are; the config must agree with both. Every offender is listed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from loraport.bundle.base import BaseModule, BaseSpec
from loraport.bundle.identity import alpha_text
from loraport.bundle.patterns import OUTPUT_HEADS, Targets, check_patterns, resolve_pattern
from loraport.bundle.peft_config import PeftConfig
from loraport.bundle.safetensors_header import Header, TensorEntry
from loraport.bundle.verdict import Limits, ModuleEntry, Violation

PREFIX = "base_model.model."
_LINEAR = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<part>[AB])\.weight")
_EMBEDDING = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_embedding_(?P<part>[AB])")

# Parts of names that other variants and other tools write, in the order in which they are looked for.
_FOREIGN: tuple[tuple[str, str, str], ...] = (
    ("lora_magnitude_vector", "UNSUPPORTED_DORA", "a magnitude of DoRA"),
    (".lora_B.bias", "UNSUPPORTED_LORA_BIAS", "a bias on B"),
    (".trainable_tokens_delta", "UNSUPPORTED_TOKEN_DELTA", "trained rows of the embedding"),
    (".lora_diag", "UNSUPPORTED_KASA", "a diagonal of KaSA"),
    (".base_layer.lora_", "UNSUPPORTED_PARAMETERS", "LoRA on bare parameters"),
    (".base_layer.bias", "UNSUPPORTED_BIAS", "a bias of the base"),
    (
        ".base_layer.weight",
        "UNSUPPORTED_FULL_WEIGHT",
        "a copy of a whole weight; save the adapter with save_embedding_layers=False",
    ),
    ("lora_down", "UNSUPPORTED_FORMAT", "a name of kohya or diffusers"),
    ("lora_up", "UNSUPPORTED_FORMAT", "a name of kohya or diffusers"),
    ("_lora.down", "UNSUPPORTED_FORMAT", "a name of diffusers"),
    ("_lora.up", "UNSUPPORTED_FORMAT", "a name of diffusers"),
    (".lora_linear_layer.", "UNSUPPORTED_FORMAT", "a name of diffusers"),
    (".lora_a", "UNSUPPORTED_FORMAT", "a name of MLX or torchtune"),
    (".lora_b", "UNSUPPORTED_FORMAT", "a name of MLX or torchtune"),
    ("_orig_mod.", "UNKNOWN_TENSOR", "a compiled model was saved; _orig_mod. must not be in the name"),
    (PREFIX + PREFIX, "UNKNOWN_TENSOR", "the prefix base_model.model. is doubled"),
)
_ADAPTER_NAME_LEFT = re.compile(r"\.lora_[AB]\.[^.]+\.weight$")


@dataclass(frozen=True, slots=True)
class _Pair:
    path: str
    a: TensorEntry
    b: TensorEntry
    module: BaseModule


@dataclass(frozen=True, slots=True)
class ModuleTable:
    """The adapted modules in order of path, and what was found on the way."""

    modules: tuple[ModuleEntry, ...]
    violations: tuple[Violation, ...]
    warnings: tuple[Violation, ...]


NO_TABLE = ModuleTable((), (), ())


def resolve_modules(config: PeftConfig | None, header: Header, base: BaseSpec, *, limits: Limits) -> ModuleTable:
    """Resolves the table. Without a config only what does not need one is checked, and no module is returned."""
    by_path = {module.path: module for module in base.modules}
    parts, violations = _sort_tensors(header, base, by_path)
    if not header.tensors:
        violations.append(Violation("NO_TENSORS", "the file lists no tensors"))
    if len({tensor.dtype for tensor in header.tensors}) > 1:
        found = ", ".join(sorted({tensor.dtype for tensor in header.tensors}))
        violations.append(Violation("MIXED_DTYPE", f"the tensors have the dtypes {found}"))
    pairs, incomplete = _pair_up(parts, by_path)
    violations.extend(incomplete)
    fitting = [pair for pair in pairs if not _check_pair(pair, limits, violations)]
    _check_wrong_base(pairs, violations)
    if config is None:
        return ModuleTable((), tuple(violations), ())
    warnings = _check_against_config(config, parts, base, limits, violations)
    modules = [entry for pair in fitting if (entry := _resolve(pair, config, limits, violations)) is not None]
    return ModuleTable(tuple(modules), tuple(violations), tuple(warnings))


def _sort_tensors(
    header: Header, base: BaseSpec, by_path: Mapping[str, BaseModule]
) -> tuple[dict[str, dict[str, TensorEntry]], list[Violation]]:
    """Returns path -> {"A": tensor, "B": tensor} for tensors of known modules, and the others as violations."""
    parts: dict[str, dict[str, TensorEntry]] = {}
    violations = []
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.name):
        match, kind = _LINEAR.fullmatch(tensor.name), "linear"
        if match is None:
            match, kind = _EMBEDDING.fullmatch(tensor.name), "embedding"
        module = by_path.get(match["path"]) if match else None
        if match is not None and module is not None and module.kind == kind:
            parts.setdefault(match["path"], {})[match["part"]] = tensor
        else:
            violations.append(_explain(tensor.name, match["path"] if match else None, base, module))
    return parts, violations


def _explain(name: str, path: str | None, base: BaseSpec, module: BaseModule | None) -> Violation:
    """Says what is wrong with a tensor that fits no module."""
    for part, code, detail in _FOREIGN:
        if part in name:
            return Violation(code, f"{name}: {detail}", name)
    if _ADAPTER_NAME_LEFT.search(name):
        return Violation("UNKNOWN_TENSOR", f"{name}: the adapter's name was left in the tensor name", name)
    if not name.startswith(PREFIX) and ".lora_" in name:
        return Violation("UNKNOWN_TENSOR", f"{name}: the prefix {PREFIX} is missing", name)
    if path is not None and module is not None:
        return Violation("UNKNOWN_TENSOR", f"{name}: {path} is a module of kind {module.kind} in the base", name)
    if path in OUTPUT_HEADS and base.tied_embeddings:
        return Violation("UNSUPPORTED_TIED_HEAD", f"{name}: the base's output head is its embedding", name)
    if path is not None:
        return Violation("UNKNOWN_TENSOR", f"{name}: the base has no module {path}", name)
    if name.startswith(PREFIX):
        return Violation(
            "UNSUPPORTED_FULL_WEIGHT", f"{name}: not an A or B but a whole weight, which would replace the base's", name
        )
    return Violation("UNKNOWN_TENSOR", f"{name}: not a tensor of a PEFT LoRA adapter", name)


def _pair_up(
    parts: Mapping[str, Mapping[str, TensorEntry]], by_path: Mapping[str, BaseModule]
) -> tuple[list[_Pair], list[Violation]]:
    pairs, violations = [], []
    for path, found in sorted(parts.items()):
        if len(found) == 2:
            pairs.append(_Pair(path, found["A"], found["B"], by_path[path]))
        else:
            tensor = next(iter(found.values()))
            missing = "B" if "A" in found else "A"
            violations.append(Violation("INCOMPLETE_PAIR", f"{tensor.name} has no {missing} beside it", tensor.name))
    return pairs, violations


def _check_pair(pair: _Pair, limits: Limits, violations: list[Violation]) -> list[Violation]:
    """Appends the faults that show without the config, and returns them."""
    found = []
    module, a, b = pair.module, pair.a, pair.b
    if module.kind not in limits.supported_kinds:
        detail = f"{a.name}: LoRA on a module of kind {module.kind} is not served"
        found.append(Violation("UNSUPPORTED_MODULE", detail, pair.path))
    if len(a.shape) != 2 or a.shape[1] != module.in_features:
        detail = f"{a.name} has shape {list(a.shape)}, the module has {module.in_features} inputs"
        found.append(Violation("SHAPE_MISMATCH", detail, a.name))
    if len(b.shape) != 2 or b.shape[0] != module.out_features:
        detail = f"{b.name} has shape {list(b.shape)}, the module has {module.out_features} outputs"
        found.append(Violation("SHAPE_MISMATCH", detail, b.name))
    if len(a.shape) == len(b.shape) == 2:
        rank = a.shape[0]
        if rank != b.shape[1]:
            detail = f"{a.name} has {rank} rows, {b.name} has {b.shape[1]} columns"
            found.append(Violation("RANK_MISMATCH", detail, a.name))
        if rank > limits.max_rank:
            found.append(Violation("RANK_LIMIT", f"{a.name} has rank {rank}, the limit is {limits.max_rank}", a.name))
    violations.extend(found)
    return found


def _check_wrong_base(pairs: list[_Pair], violations: list[Violation]) -> None:
    misfits = {violation.subject for violation in violations if violation.code == "SHAPE_MISMATCH"}
    if len(pairs) > 1 and all(pair.a.name in misfits or pair.b.name in misfits for pair in pairs):
        detail = f"none of the {len(pairs)} adapted modules has the shape of the base's module"
        violations.append(Violation("WRONG_BASE_SHAPE", detail))


def _check_against_config(
    config: PeftConfig,
    parts: Mapping[str, Mapping[str, TensorEntry]],
    base: BaseSpec,
    limits: Limits,
    violations: list[Violation],
) -> list[Violation]:
    """Appends violations of patterns and targets, and returns warnings."""
    wrong, warnings = check_patterns(config, parts, (module.path for module in base.modules))
    violations.extend(wrong)
    targets = Targets(config)
    if not targets.checkable:
        text = "target_modules or exclude_modules is a pattern or missing and was not evaluated"
        return [*warnings, Violation("TARGET_NOT_CHECKED", text, "target_modules")]
    kinds = {module.path: module.kind for module in base.modules}
    for path in sorted(parts):
        if not targets.matches(path, kinds[path]):
            violations.append(Violation("TARGET_MISMATCH", f"the file adapts {path}, the config does not", path))
    for module in base.modules if targets.lists_modules else ():
        if module.kind in limits.supported_kinds and module.path not in parts and targets.matches(module.path):
            violations.append(
                Violation("MISSING_MODULE", f"the config targets {module.path}, the file lacks it", module.path)
            )
    return warnings


def _resolve(pair: _Pair, config: PeftConfig, limits: Limits, violations: list[Violation]) -> ModuleEntry | None:
    """Returns the row of one pair, or appends why there is none."""
    found = []
    rank = resolve_pattern(config.rank_pattern, pair.path, config.rank)
    alpha = resolve_pattern(config.alpha_pattern, pair.path, config.alpha)
    if rank is None or alpha is None:
        key = "rank_pattern" if rank is None else "alpha_pattern"
        detail = f"two entries of {key} give {pair.path} different values"
        violations.append(Violation("AMBIGUOUS_PATTERN", detail, pair.path))
        return None
    if rank != pair.a.shape[0]:
        detail = f"{pair.a.name} has rank {pair.a.shape[0]}, the config says {rank}"
        found.append(Violation("RANK_MISMATCH", detail, pair.a.name))
    if config.fan_in_fan_out != pair.module.fan_in_fan_out:
        detail = f"fan_in_fan_out is {config.fan_in_fan_out}, {pair.path} of the base needs the opposite"
        found.append(Violation("FAN_IN_FAN_OUT_MISMATCH", detail, pair.path))
    scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    if not 0 < scaling <= limits.max_scaling:
        detail = f"the scale of {pair.path} is {scaling:.6g}, allowed are values above 0 up to {limits.max_scaling:g}"
        found.append(Violation("SCALING_LIMIT", detail, pair.path))
    violations.extend(found)
    if found:
        return None
    return ModuleEntry(
        path=pair.path,
        rank=rank,
        alpha=alpha_text(alpha),
        scaling=scaling,
        in_features=pair.module.in_features,
        out_features=pair.module.out_features,
        a_name=pair.a.name,
        b_name=pair.b.name,
    )
