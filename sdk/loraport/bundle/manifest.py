"""The manifest that a publisher signs: an in-toto statement over the two files of a bundle.

Its predicate has two parts. `identity` says what the revision is and is hashed into its id;
`statement` says who calls it what, and since when. Reading is strict: the bytes must be the
canonical form of a document in which every value has its one legal type, so that a signature over
the bytes is a signature over the meaning.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loraport.bundle.canonical import CanonicalError, StrictJsonError, canonical, load_strict
from loraport.bundle.digest import PREFIX, is_digest, parse_digest
from loraport.bundle.identity import NAMING, SCHEMA, alpha_text, revision_id_of, tensor_names
from loraport.bundle.verdict import ModuleEntry, Verdict

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://loraport.dev/adapter-manifest/v1"
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
# A signed envelope carries the manifest in base64 and may have 256 KiB.
MAX_MANIFEST_BYTES = 190 * 1024
MAX_NOTES_LENGTH = 2000
MAX_TRAINING_ENTRIES = 32
MAX_TEXT_LENGTH = 1000

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_TIME = re.compile(r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?Z")
_HEX = re.compile(r"[0-9a-f]{64}")
_DTYPES = ("F32", "F16", "BF16")
_IDENTITY_KEYS = {
    "schema", "tenant", "base", "weights", "modules", "dtype", "naming", "activation", "training",
}  # fmt: skip
_STATEMENT_KEYS = {"adapter", "version", "created_time", "source", "config_sha256", "config_size_bytes", "notes"}
_MODULE_KEYS = {"path", "rank", "alpha", "scaling", "a_shape", "b_shape"}


class ManifestError(ValueError):
    """A document that is not a manifest, or a verdict that cannot become one. One line says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest that was read and checked. Digests are in the "sha256:<hex>" form, sizes in bytes."""

    identity: Mapping[str, Any]
    statement: Mapping[str, Any]
    revision_id: str
    tenant: str
    adapter: str
    version: int
    created_time: str
    base_weights_digest: str
    base_config_digest: str
    base_tokenizer_digest: str
    weights_digest: str
    weights_size: int
    config_digest: str
    config_size: int
    dtype: str
    modules: tuple[ModuleEntry, ...]
    training: Mapping[str, str]


def build_manifest(
    verdict: Verdict,
    *,
    adapter: str,
    version: int,
    created_time: str,
    source: Mapping[str, str],
    notes: str = "",
) -> bytes:
    """Returns the canonical manifest of an admitted bundle.

    `version` rises strictly from one publication of an adapter to the next. `created_time` is
    RFC 3339 in UTC ("2026-01-31T12:00:00Z"). `source` has exactly `kind` and `uri`.

    Raises:
        ManifestError: the bundle was not admitted, or an argument is not legal.
    """
    if not verdict.admitted or verdict.identity is None:
        raise ManifestError("only an admitted bundle has a manifest")
    if verdict.weights_digest is None or verdict.config_digest is None:
        raise ManifestError("the verdict lacks the digests of its files")
    config_sha256 = parse_digest(verdict.config_digest)
    document = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": CONFIG_NAME, "digest": {"sha256": config_sha256}},
            {"name": WEIGHTS_NAME, "digest": {"sha256": parse_digest(verdict.weights_digest)}},
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "identity": dict(verdict.identity),
            "statement": {
                "adapter": adapter,
                "version": version,
                "created_time": created_time,
                "source": dict(source),
                "config_sha256": config_sha256,
                "config_size_bytes": verdict.config_size,
                "notes": notes,
            },
        },
    }
    try:
        data = canonical(document)
    except CanonicalError as error:
        raise ManifestError(str(error)) from None
    parse_manifest(data)
    return data


def parse_manifest(data: bytes) -> Manifest:
    """Reads a manifest. The caller has verified the signature over `data`.

    Raises:
        ManifestError: `data` is not the canonical form of a legal manifest.
    """
    document = _load(data)
    _keys(document, {"_type", "subject", "predicateType", "predicate"}, "manifest")
    _require(document["_type"] == STATEMENT_TYPE, "_type is not that of an in-toto statement")
    _require(document["predicateType"] == PREDICATE_TYPE, "predicateType is not that of an adapter manifest")
    predicate = _keys(document["predicate"], {"identity", "statement"}, "predicate")
    identity = _keys(predicate["identity"], _IDENTITY_KEYS, "identity")
    statement = _keys(predicate["statement"], _STATEMENT_KEYS, "statement")
    modules = _check_identity(identity)
    _check_statement(statement)
    weights, config = identity["weights"], statement["config_sha256"]
    subject = [
        {"name": CONFIG_NAME, "digest": {"sha256": config}},
        {"name": WEIGHTS_NAME, "digest": {"sha256": weights["sha256"]}},
    ]
    _require(document["subject"] == subject, "subject does not list the two files with the digests of the predicate")
    return Manifest(
        identity=identity,
        statement=statement,
        revision_id=revision_id_of(identity),
        tenant=identity["tenant"],
        adapter=statement["adapter"],
        version=statement["version"],
        created_time=statement["created_time"],
        base_weights_digest=identity["base"]["weights"],
        base_config_digest=identity["base"]["config"],
        base_tokenizer_digest=identity["base"]["tokenizer"],
        weights_digest=PREFIX + weights["sha256"],
        weights_size=weights["size_bytes"],
        config_digest=PREFIX + config,
        config_size=statement["config_size_bytes"],
        dtype=identity["dtype"],
        modules=modules,
        training=identity["training"],
    )


def _load(data: bytes) -> dict[str, Any]:
    try:
        document = load_strict(data, max_bytes=MAX_MANIFEST_BYTES, max_depth=6)
        _require(isinstance(document, dict), "a manifest is a JSON object")
        _require(canonical(document) == data, "the manifest is not in canonical form")
    except (StrictJsonError, CanonicalError) as error:
        raise ManifestError(f"not a manifest: {error}") from None
    return document  # type: ignore[no-any-return]


def check_training(training: Any) -> None:
    """Checks declared training provenance: at most 32 pairs of text, each of at most 1000 characters.

    Raises:
        ManifestError: it is anything else.
    """
    _require(isinstance(training, Mapping) and len(training) <= MAX_TRAINING_ENTRIES, "training must be a small object")
    for key, value in training.items():
        _text(key, "a key of training")
        _text(value, f"training.{key}")


def is_name(value: object) -> bool:
    """Says whether `value` may name a tenant or an adapter: 1 to 63 of a-z, 0-9 and "-", a letter first."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _check_identity(identity: dict[str, Any]) -> tuple[ModuleEntry, ...]:
    _require(identity["schema"] == SCHEMA, f"identity.schema is not {SCHEMA}")
    _require(is_name(identity["tenant"]), "identity.tenant is not a legal name")
    base = _keys(identity["base"], {"weights", "config", "tokenizer"}, "identity.base")
    _require(all(is_digest(value) for value in base.values()), "identity.base must hold three digests")
    weights = _keys(identity["weights"], {"sha256", "size_bytes"}, "identity.weights")
    _hex(weights["sha256"], "identity.weights.sha256")
    _positive(weights["size_bytes"], "identity.weights.size_bytes")
    _require(identity["dtype"] in _DTYPES, "identity.dtype is not F32, F16 or BF16")
    _require(identity["naming"] == NAMING, f"identity.naming is not {NAMING}")
    _require(identity["activation"] == {"mode": "always"}, "identity.activation is not supported")
    check_training(identity["training"])
    rows = identity["modules"]
    _require(isinstance(rows, list) and len(rows) > 0, "identity.modules must be a list that is not empty")
    modules = tuple(_module(row) for row in rows)
    rising = all(a.path < b.path for a, b in pairwise(modules))
    _require(rising, "identity.modules is not in strictly rising order of path")
    return modules


def _module(row: Any) -> ModuleEntry:
    _keys(row, _MODULE_KEYS, "a row of identity.modules")
    path, rank = row["path"], row["rank"]
    _text(path, "a module path")
    _positive(rank, f"rank of {path}")
    a_shape, b_shape = _shape(row["a_shape"], path), _shape(row["b_shape"], path)
    _require(a_shape[0] == rank == b_shape[1], f"the shapes of {path} do not have its rank")
    a_name, b_name = tensor_names(path)
    return ModuleEntry(
        path=path,
        rank=rank,
        alpha=_alpha(row["alpha"], path),
        scaling=_scaling(row["scaling"], path),
        in_features=a_shape[1],
        out_features=b_shape[0],
        a_name=a_name,
        b_name=b_name,
    )


def _shape(value: Any, path: str) -> list[int]:
    _require(isinstance(value, list) and len(value) == 2, f"a shape of {path} must have two dimensions")
    for dimension in value:
        _positive(dimension, f"a dimension of {path}")
    return value  # type: ignore[no-any-return]


def _alpha(value: Any, path: str) -> str:
    _text(value, f"alpha of {path}")
    try:
        number = float(value)
    except ValueError:
        raise ManifestError(f"alpha of {path} is not a number") from None
    _require(math.isfinite(number) and number > 0 and alpha_text(number) == value, f"alpha of {path} is not canonical")
    return value  # type: ignore[no-any-return]


def _scaling(value: Any, path: str) -> float:
    _text(value, f"scaling of {path}")
    try:
        number = float.fromhex(value)
    except (ValueError, OverflowError):
        raise ManifestError(f"scaling of {path} is not the text of float.hex") from None
    _require(math.isfinite(number) and number > 0 and number.hex() == value, f"scaling of {path} is not canonical")
    return number


def _check_statement(statement: dict[str, Any]) -> None:
    _require(is_name(statement["adapter"]), "statement.adapter is not a legal name")
    _positive(statement["version"], "statement.version")
    time = statement["created_time"]
    _require(isinstance(time, str) and _TIME.fullmatch(time) is not None, "statement.created_time is not RFC 3339 UTC")
    source = _keys(statement["source"], {"kind", "uri"}, "statement.source")
    for key, value in source.items():
        _text(value, f"statement.source.{key}")
    _hex(statement["config_sha256"], "statement.config_sha256")
    _positive(statement["config_size_bytes"], "statement.config_size_bytes")
    notes = statement["notes"]
    _require(
        isinstance(notes, str) and len(notes) <= MAX_NOTES_LENGTH, "statement.notes must be text of limited length"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ManifestError(message)


def _keys(value: Any, keys: set[str], what: str) -> dict[str, Any]:
    _require(isinstance(value, dict), f"{what} must be an object")
    _require(set(value) == keys, f"{what} must have exactly the keys {', '.join(sorted(keys))}")
    return value  # type: ignore[no-any-return]


def _text(value: Any, what: str) -> None:
    _require(isinstance(value, str) and 1 <= len(value) <= MAX_TEXT_LENGTH, f"{what} must be text of limited length")


def _positive(value: Any, what: str) -> None:
    _require(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1, f"{what} must be a positive integer"
    )


def _hex(value: Any, what: str) -> None:
    _require(isinstance(value, str) and _HEX.fullmatch(value) is not None, f"{what} must be 64 hex digits")
