"""The base model as admission sees it: three digests and a table of the modules an adapter may name.

The table says what the checkpoint holds, not what an executor can serve; the limits of a
verification say the latter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from loraport.bundle.canonical import canonical
from loraport.bundle.digest import is_digest, sha256_digest

ModuleKind = Literal["linear", "embedding"]

SCHEMA = "loraport.base-model.v1"
_MODULE_KEYS = {"path", "kind", "in_features", "out_features", "fan_in_fan_out"}
_SPEC_KEYS = {
    "schema",
    "weights_digest",
    "config_digest",
    "tokenizer_digest",
    "dtype",
    "architecture",
    "tied_embeddings",
    "vocab_size",
    "max_positions",
    "modules",
}


@dataclass(frozen=True, slots=True)
class BaseModule:
    """One module with a weight matrix.

    `path` is the module's dotted name in the model, without ".weight". A linear module maps
    `in_features` to `out_features`; an embedding has one row per token (`in_features`) of
    `out_features` values. `fan_in_fan_out` says that the stored weight is (in, out).
    """

    path: str
    kind: ModuleKind
    in_features: int
    out_features: int
    fan_in_fan_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """A frozen checkpoint.

    `dtype` is the safetensors name of the stored weights (F32, BF16, F16). `modules` is sorted by
    path. With `tied_embeddings` the output head is the embedding itself and is not in `modules`.
    `vocab_size` is in tokens, `max_positions` in tokens of context.
    """

    weights_digest: str
    config_digest: str
    tokenizer_digest: str
    dtype: str
    architecture: str
    tied_embeddings: bool
    vocab_size: int
    max_positions: int
    modules: tuple[BaseModule, ...]

    def digests(self) -> dict[str, str]:
        """Returns the part of an adapter's identity that names its base."""
        return {"weights": self.weights_digest, "config": self.config_digest, "tokenizer": self.tokenizer_digest}


def base_id(spec: BaseSpec) -> str:
    """Returns the digest that identifies a base: it covers weights, config and tokenizer, and no names."""
    return base_id_of(spec.digests())


def base_id_of(digests: Mapping[str, str]) -> str:
    """Returns the base id of three digests, named as in `BaseSpec.digests` and in an adapter's identity."""
    return sha256_digest(canonical({"schema": SCHEMA, **digests}))


def to_json(spec: BaseSpec) -> dict[str, Any]:
    """Returns `spec` as an object of strings, integers, booleans and arrays; `from_json` reads it back."""
    return {
        "schema": SCHEMA,
        "weights_digest": spec.weights_digest,
        "config_digest": spec.config_digest,
        "tokenizer_digest": spec.tokenizer_digest,
        "dtype": spec.dtype,
        "architecture": spec.architecture,
        "tied_embeddings": spec.tied_embeddings,
        "vocab_size": spec.vocab_size,
        "max_positions": spec.max_positions,
        "modules": [
            {
                "path": module.path,
                "kind": module.kind,
                "in_features": module.in_features,
                "out_features": module.out_features,
                "fan_in_fan_out": module.fan_in_fan_out,
            }
            for module in spec.modules
        ],
    }


def from_json(value: Any) -> BaseSpec:
    """Reads what `to_json` wrote.

    Raises:
        ValueError: a key is missing or unknown, a value has the wrong type or range, or the
            modules are not in strictly rising order of path.
    """
    if not isinstance(value, dict) or set(value) != _SPEC_KEYS or value["schema"] != SCHEMA:
        raise ValueError(f"a base model must be an object with schema {SCHEMA} and its ten keys")
    for key in ("weights_digest", "config_digest", "tokenizer_digest"):
        if not is_digest(value[key]):
            raise ValueError(f"{key} is not a digest")
    for key in ("dtype", "architecture"):
        if not isinstance(value[key], str) or not value[key]:
            raise ValueError(f"{key} must be text")
    for key in ("vocab_size", "max_positions"):
        _require_positive(value[key], key)
    if not isinstance(value["tied_embeddings"], bool):
        raise ValueError("tied_embeddings must be true or false")
    if not isinstance(value["modules"], list):
        raise ValueError("modules must be an array")
    modules = tuple(_module_from_json(item) for item in value["modules"])
    if any(a.path >= b.path for a, b in pairwise(modules)):
        raise ValueError("modules must be in strictly rising order of path")
    return BaseSpec(modules=modules, **{key: value[key] for key in _SPEC_KEYS if key not in ("schema", "modules")})


def _module_from_json(item: Any) -> BaseModule:
    if not isinstance(item, dict) or set(item) != _MODULE_KEYS:
        raise ValueError("a module must be an object with its five keys")
    if not isinstance(item["path"], str) or not item["path"]:
        raise ValueError("a module's path must be text")
    if item["kind"] not in ("linear", "embedding"):
        raise ValueError(f"unknown kind of module {item['path']}")
    for key in ("in_features", "out_features"):
        _require_positive(item[key], f"{key} of {item['path']}")
    if not isinstance(item["fan_in_fan_out"], bool):
        raise ValueError(f"fan_in_fan_out of {item['path']} must be true or false")
    return BaseModule(**item)


def _require_positive(value: Any, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} must be a positive integer")
