"""What a revision is: the canonical document whose digest is the revision id.

The identity holds everything that gives the bytes of the weights their meaning, and nothing else.
Two bundles that differ in the order, spacing or history of their config have one identity; another
tenant, base, scale or byte of weights is another revision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraport.bundle.base import BaseSpec, ModuleKind
from loraport.bundle.canonical import canonical
from loraport.bundle.digest import parse_digest, sha256_digest
from loraport.bundle.verdict import ModuleEntry

SCHEMA = "loraport.adapter-identity.v1"
NAMING = "peft"


def alpha_text(alpha: int | float) -> str:
    """Returns the shortest decimal text of a lora_alpha: 16 and 16.0 are both "16"."""
    return str(int(alpha)) if float(alpha).is_integer() else repr(float(alpha))


@dataclass(frozen=True, slots=True)
class WeightsFacts:
    """The weights file: its digest, its size in bytes, and the dtype of its tensors."""

    digest: str
    size: int
    dtype: str


def build_identity(
    weights: WeightsFacts,
    modules: Sequence[ModuleEntry],
    *,
    tenant: str,
    base: BaseSpec,
    training: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the identity document of a verified bundle. `modules` may come in any order."""
    return {
        "schema": SCHEMA,
        "tenant": tenant,
        "base": base.digests(),
        "weights": {"sha256": parse_digest(weights.digest), "size_bytes": weights.size},
        "modules": [module_to_json(module) for module in sorted(modules, key=lambda module: module.path)],
        "dtype": weights.dtype,
        "naming": NAMING,
        "activation": {"mode": "always"},
        "training": dict(training),
    }


def module_to_json(module: ModuleEntry) -> dict[str, Any]:
    """Returns a row of the signed module table."""
    return {
        "path": module.path,
        "rank": module.rank,
        "alpha": module.alpha,
        "scaling": module.scaling.hex(),
        "a_shape": [module.rank, module.in_features],
        "b_shape": [module.out_features, module.rank],
    }


def tensor_names(path: str, kind: ModuleKind = "linear") -> tuple[str, str]:
    """Returns the names of A and B of a module in the "peft" naming."""
    if kind == "embedding":
        return f"base_model.model.{path}.lora_embedding_A", f"base_model.model.{path}.lora_embedding_B"
    return f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"


def revision_id_of(identity: Mapping[str, Any]) -> str:
    """Returns the revision id: the digest of the canonical identity."""
    return sha256_digest(canonical(dict(identity)))
