"""Which modules a config speaks of, decided with names only and no regular expressions.

PEFT matches rank and alpha patterns with `(.*\\.)?(KEY)$` and takes the first that matches in the
order of the file. For a KEY that is a literal name this means: KEY is the module's path, or the end
of it after a dot. (A dot in KEY would match any character in PEFT. Two modules of one base whose
paths differ only there are not known, and a KEY with dots that names no module is refused.)
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from loraport.bundle.base import ModuleKind
from loraport.bundle.peft_config import PeftConfig
from loraport.bundle.verdict import Violation

_Number = TypeVar("_Number", bound=float)

ALL_LINEAR = "all-linear"
OUTPUT_HEADS = frozenset({"lm_head", "embed_out"})


def suffixes(path: str) -> list[str]:
    """Returns the path and every end of it that begins after a dot, longest first."""
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]


def resolve_pattern(pattern: Mapping[str, _Number], path: str, default: _Number) -> _Number | None:
    """Returns the value for the module at `path`, or None when two patterns disagree."""
    values = {pattern[suffix] for suffix in suffixes(path) if suffix in pattern}
    if len(values) > 1:
        return None
    return values.pop() if values else default


def check_patterns(
    config: PeftConfig, adapted: Iterable[str], base_paths: Iterable[str]
) -> tuple[list[Violation], list[Violation]]:
    """Returns violations and warnings for patterns that match nothing."""
    of_base = {suffix for path in base_paths for suffix in suffixes(path)}
    of_file = {suffix for path in adapted for suffix in suffixes(path)}
    violations, warnings = [], []
    for key, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for name in pattern:
            if "." in name and name not in of_base:
                violations.append(Violation("UNMATCHED_PATTERN", f"{key} names {name}, which the base lacks", name))
            elif name not in of_file:
                warnings.append(Violation("UNUSED_PATTERN", f"{key} names {name}, which is not adapted", name))
    return violations, warnings


class Targets:
    """Answers whether the config targets a module, as PEFT would.

    `checkable` is false when the config targets by a pattern, or by a default of PEFT: then only
    the tensors decide, and `matches` must not be asked.
    """

    def __init__(self, config: PeftConfig) -> None:
        target, exclude = config.target_modules, config.exclude_modules
        self._all_linear = isinstance(target, str) and target.lower() == ALL_LINEAR
        self._names = frozenset(target) if isinstance(target, tuple) else frozenset()
        self._excluded = frozenset(exclude)
        self._layers = config.layers_to_transform
        self._layer_names = [name.split(".") for name in config.layers_pattern]
        self.checkable = isinstance(exclude, tuple) and (isinstance(target, tuple) or self._all_linear)
        self.lists_modules = isinstance(target, tuple)

    def matches(self, path: str, kind: ModuleKind = "linear") -> bool:
        """Says whether the module at `path` is targeted."""
        ends = suffixes(path)
        if not self._excluded.isdisjoint(ends):
            return False
        if self._all_linear:
            return path not in OUTPUT_HEADS and kind == "linear"
        if path in self._names:
            return True  # PEFT does not filter a full path by layer
        if self._names.isdisjoint(ends):
            return False
        return self._layers is None or self._layer_index(path) in self._layers

    def _layer_index(self, path: str) -> int | None:
        parts = path.split(".")
        if not self._layer_names:
            # PEFT: the first number with two names before it and one after it.
            return next((int(part) for part in parts[2:-1] if part.isdigit()), None)
        for before in self._layer_names:
            for index in range(len(parts) - len(before) - 1):
                after = index + len(before)
                if parts[index:after] == before and parts[after].isdigit():
                    return int(parts[after])
        return None
