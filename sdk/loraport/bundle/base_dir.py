"""Reads a Hugging Face causal-LM directory into a BaseSpec, without torch.

Only config.json, the safetensors headers and digests of the files are looked at. The module table
is what the checkpoint names: two-dimensional weights, told apart into embeddings and linear modules.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraport.bundle.base import BaseModule, BaseSpec
from loraport.bundle.canonical import StrictJsonError, canonical, load_strict
from loraport.bundle.digest import PREFIX, sha256_digest
from loraport.bundle.patterns import OUTPUT_HEADS
from loraport.bundle.safetensors_header import DTYPE_BITS, PREFIX_BYTES, TensorEntry, header_length, parse_header
from loraport.bundle.verdict import Limits, Violation

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 32 * 1024 * 1024
_READ_BYTES = 1024 * 1024
# A base is chosen by the operator, so these bounds are against accidents, not against attacks.
_LIMITS = Limits(max_header_bytes=64 * 1024 * 1024, max_tensors=200_000, max_dimension=2**40, max_file_bytes=2**50)
_SERVED_DTYPES = ("F32", "BF16", "F16")
# Families whose linear layers are Conv1D, with weights stored as (in, out).
_CONV1D_FAMILIES = frozenset({"gpt2", "openai-gpt", "imagegpt"})
# Where the decoder hangs in the causal-LM class; checkpoints of the bare decoder lack this prefix.
_DECODER_PREFIX = {
    "gpt2": "transformer", "openai-gpt": "transformer", "gptj": "transformer", "gpt_neo": "transformer",
    "gpt_bigcode": "transformer", "codegen": "transformer", "bloom": "transformer", "falcon": "transformer",
    "mpt": "transformer", "gpt_neox": "gpt_neox",
}  # fmt: skip
_EMBEDDING_LEAVES = frozenset(
    {"embed_tokens", "embed_in", "embed_positions", "wte", "wpe", "word_embeddings", "tokens_embed", "positions_embed"}
)
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_TOKENIZER_PARTS = ("added_tokens.json", "merges.txt", "spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")


class BaseModelError(ValueError):
    """A directory that is not a base model which can be served. One line says why."""


@dataclass(frozen=True, slots=True)
class _Shard:
    digest: str
    tensors: tuple[TensorEntry, ...]


def read_base_dir(path: str | Path) -> BaseSpec:
    """Reads the directory of a causal language model with safetensors weights, in one file or several.

    The digest of the weights is that of the file, or of the canonical object {file name: sha256} of
    all shards. The digest of the tokenizer is that of tokenizer.json, or where there is none of the
    canonical object over the other tokenizer files.

    Raises:
        BaseModelError: the directory is not such a model, or a file of it cannot be read.
    """
    folder = Path(path)
    try:
        return _read(folder)
    except OSError as error:
        raise BaseModelError(f"cannot read {error.filename or folder}: {error.strerror or error}") from None


def _read(folder: Path) -> BaseSpec:
    if not folder.is_dir():
        raise BaseModelError(f"{folder} is not a directory")
    raw_config, config = _json_object(folder / "config.json")
    architecture, family = _check_architecture(config, folder)
    shards = {name: _read_shard(folder / name) for name in _shard_names(folder)}
    tensors: dict[str, TensorEntry] = {}
    for name, shard in sorted(shards.items()):
        for tensor in shard.tensors:
            if tensor.name in tensors:
                raise BaseModelError(f"{folder / name} holds {tensor.name} a second time")
            tensors[tensor.name] = tensor
    vocab_size = _positive(config, ("vocab_size",), folder)
    tied = _is_tied(config, tensors, folder)
    modules = _modules(tensors.values(), family=family, vocab_size=vocab_size, tied=tied, config=config)
    if not any(module.kind == "linear" for module in modules):
        raise BaseModelError(f"{folder} holds no linear module")
    return BaseSpec(
        weights_digest=_joint_digest({name: shard.digest for name, shard in shards.items()}, SINGLE),
        config_digest=sha256_digest(raw_config),
        tokenizer_digest=_tokenizer_digest(folder),
        dtype=_dtype(tensors.values(), folder),
        architecture=architecture,
        tied_embeddings=tied,
        vocab_size=vocab_size,
        max_positions=_positive(config, _POSITION_KEYS, folder),
        modules=modules,
    )


def _json_object(path: Path) -> tuple[bytes, dict[str, Any]]:
    if not path.is_file():
        raise BaseModelError(f"{path} is missing")
    raw = path.read_bytes()
    try:
        value = load_strict(raw, max_bytes=_MAX_JSON_BYTES, max_depth=64, allow_floats=True, wide_integers=True)
    except StrictJsonError as error:
        raise BaseModelError(f"{path} is not a legal config: {error.detail}") from None
    if not isinstance(value, dict):
        raise BaseModelError(f"{path} does not hold a JSON object")
    return raw, value


def _check_architecture(config: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    names, family = config.get("architectures"), config.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise BaseModelError(f"{folder} is not a causal language model: architectures is {names!r:.100}")
    if config.get("quantization_config") is not None:
        raise BaseModelError(f"{folder} is quantized; only plain F32, BF16 and F16 weights are served")
    return name, family if isinstance(family, str) else ""


def _shard_names(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise BaseModelError(f"{folder} has neither {SINGLE} nor {INDEX}")
    _, index = _json_object(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BaseModelError(f"{folder / INDEX} has no weight_map")
    names = set(weight_map.values())
    for name in names:
        if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise BaseModelError(f"{folder / INDEX} names {name!r:.100}, which is no file beside it")
    return sorted(names)


def _read_shard(path: Path) -> _Shard:
    """Reads the header, then the rest, of one file, and hashes it all through one descriptor."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(PREFIX_BYTES)
        length = header_length(prefix, file_size=size, limits=_LIMITS)
        if isinstance(length, Violation):
            raise BaseModelError(f"{path} is not a safetensors file: {length.detail}")
        raw = file.read(length)
        # Alignment matters for bytes that are used in place; here the header is only listed.
        header, violations = parse_header(
            raw, file_size=size, limits=_LIMITS, dtypes=frozenset(DTYPE_BITS), require_alignment=False
        )
        if header is None:
            raise BaseModelError(f"{path} is not a legal safetensors file: {violations[0].detail}")
        digest.update(prefix)
        digest.update(raw)
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return _Shard(PREFIX + digest.hexdigest(), header.tensors)


def _is_tied(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], folder: Path) -> bool:
    has_head = any(f"{head}.weight" in tensors for head in OUTPUT_HEADS)
    tied = config.get("tie_word_embeddings", not has_head)
    if not isinstance(tied, bool):
        raise BaseModelError(f"tie_word_embeddings of {folder} is not true or false")
    if not tied and not has_head:
        raise BaseModelError(f"{folder} says that its output head is not tied, but has no weight for it")
    return tied


def _modules(
    tensors: Iterable[TensorEntry], *, family: str, vocab_size: int, tied: bool, config: Mapping[str, Any]
) -> tuple[BaseModule, ...]:
    prefix = _DECODER_PREFIX.get(family, "model") + "."
    weights = [t for t in tensors if t.name.endswith(".weight") and len(t.shape) == 2 and t.dtype in _SERVED_DTYPES]
    bare = not any(tensor.name.startswith(prefix) for tensor in weights)
    modules = []
    for tensor in weights:
        path = tensor.name.removesuffix(".weight")
        is_head = path in OUTPUT_HEADS
        # The experts of a mixture are bare parameters in the model, whatever the checkpoint calls them.
        # Some norms have a weight per head, and so two dimensions.
        if (is_head and tied) or ".experts." in path or path.endswith("norm"):
            continue
        if is_head:
            path = "lm_head"  # GPT-NeoX checkpoints still say embed_out, its class no longer does
        elif bare:
            path = prefix + path
        modules.append(_module(path, tensor.shape, family=family, vocab_size=vocab_size, is_head=is_head))
    return tuple(sorted(modules, key=lambda module: module.path))


def _module(path: str, shape: tuple[int, ...], *, family: str, vocab_size: int, is_head: bool) -> BaseModule:
    leaf = path.rpartition(".")[2]
    if not is_head and leaf in _EMBEDDING_LEAVES:
        return BaseModule(path, "embedding", in_features=shape[0], out_features=shape[1])
    if family in _CONV1D_FAMILIES and not is_head:
        return BaseModule(path, "linear", in_features=shape[0], out_features=shape[1], fan_in_fan_out=True)
    return BaseModule(path, "linear", in_features=shape[1], out_features=shape[0])


def _dtype(tensors: Iterable[TensorEntry], folder: Path) -> str:
    """Returns the dtype that most of the bytes have."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.end - tensor.begin
    dtype = max(sorted(sizes), key=lambda name: sizes[name], default="")
    if dtype not in _SERVED_DTYPES:
        raise BaseModelError(f"{folder} is stored as {dtype or 'nothing'}, not as F32, BF16 or F16")
    return dtype


def _positive(config: Mapping[str, Any], keys: tuple[str, ...], folder: Path) -> int:
    for key in keys:
        value = config.get(key)
        if type(value) is int and value > 0:
            return value
    raise BaseModelError(f"{folder / 'config.json'} has no positive {' or '.join(keys)}")


def _tokenizer_digest(folder: Path) -> str:
    if (folder / "tokenizer.json").is_file():
        return _file_digest(folder / "tokenizer.json")
    return sha256_digest(
        canonical({name: _file_digest(folder / name) for name in _TOKENIZER_PARTS if (folder / name).is_file()})
    )


def _joint_digest(digests: Mapping[str, str], single: str) -> str:
    return digests[single] if set(digests) == {single} else sha256_digest(canonical(dict(digests)))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return PREFIX + hashlib.file_digest(file, "sha256").hexdigest()
