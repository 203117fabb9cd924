"""The values that a verification takes and gives: limits in, a verdict with every violation out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraport.bundle.base import ModuleKind


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault, or one warning.

    `code` is a key of `codes.VIOLATIONS` or `codes.WARNINGS`. `detail` is one line that names the
    offender. `subject` is the tensor, config key, module or file at fault, or empty.
    """

    code: str
    detail: str
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What admission accepts at most. Sizes are in bytes, both ends of a range are allowed."""

    max_config_bytes: int = 64 * 1024
    max_header_bytes: int = 1024 * 1024
    max_metadata_pairs: int = 32
    max_metadata_bytes: int = 8 * 1024
    max_tensors: int = 4096
    max_name_length: int = 256
    max_dimension: int = 2**20
    max_rank: int = 256
    max_file_bytes: int = 1024**3
    # An honest adapter's alpha / r is below ten; a larger factor makes any B a wrecking ball.
    max_scaling: float = 64.0
    # scaling * |A| * |B| (Frobenius norms) of a module, which no norm of its update exceeds. Honest ones stay below a
    # few thousand; see docs/adr/0012-update-norm.md. Infinity: no limit but UPDATE_OVERFLOW's.
    max_update_norm: float = 2.0**14
    # Denormal numbers slow CPU arithmetic many-fold, so a file full of them is worth a warning.
    max_denormal_share: float = 0.01
    # Kinds of module that the executors can serve.
    supported_kinds: frozenset[ModuleKind] = frozenset({"linear", "embedding"})
    # The dtype the weights are cast to on the device; None when any of the three may be chosen later.
    serving_dtype: str | None = None
    # Violations beyond this number are counted, not listed.
    max_listed: int = 1000


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEntry:
    """One adapted module: out += scaling * B @ A @ in, A is (rank, in_features), B is (out_features, rank).

    For an embedding, `in` is one-hot over the vocabulary: A has a column per token.

    `alpha` is the shortest decimal text of lora_alpha ("16", "22.6"). `a_name` and `b_name` are the
    tensor names in the weights file.
    """

    path: str
    rank: int
    alpha: str
    scaling: float
    in_features: int
    out_features: int
    a_name: str
    b_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a verification found.

    `identity` and `revision_id` are present exactly when `admitted`. Digests and sizes describe the
    bytes that were read, and are present whenever they could be read to the end. `modules` is
    sorted by path and is as far resolved as the violations allowed.
    """

    admitted: bool
    violations: tuple[Violation, ...]
    warnings: tuple[Violation, ...]
    identity: Mapping[str, Any] | None
    revision_id: str | None
    modules: tuple[ModuleEntry, ...]
    dtype: str | None
    weights_digest: str | None
    weights_size: int | None
    config_digest: str | None
    config_size: int | None
