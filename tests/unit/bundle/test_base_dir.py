"""Base models on disk: the table and the digests, and one clear line for what is none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraport.bundle.base import BaseModule, base_id, from_json, to_json
from loraport.bundle.base_dir import BaseModelError, read_base_dir
from loraport.bundle.canonical import canonical
from loraport.bundle.digest import sha256_digest
from tests.bundle_files import entries, pack, small_base

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
LAYER = "model.layers.0."


def checkpoint(*, head: bool = True, prefix: str = "model.") -> dict[str, np.ndarray]:
    shapes = {
        f"{prefix}embed_tokens.weight": (32, 16),
        f"{prefix}layers.0.self_attn.q_proj.weight": (16, 16),
        f"{prefix}layers.0.self_attn.q_proj.bias": (16,),
        f"{prefix}layers.0.mlp.gate_up_proj.weight": (48, 16),
        f"{prefix}layers.0.input_layernorm.weight": (16,),
        f"{prefix}norm.weight": (16,),
    }
    if head:
        shapes["lm_head.weight"] = (32, 16)
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, dtype: str = "F32", **changes: Any) -> Path:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    data = pack(*entries(checkpoint() if tensors is None else tensors, dtype))
    (folder / "model.safetensors").write_bytes(data)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def paths(folder: Path) -> dict[str, tuple[str, int, int]]:
    modules = read_base_dir(folder).modules
    return {module.path: (module.kind, module.in_features, module.out_features) for module in modules}


def test_an_untied_llama(tmp_path: Path) -> None:
    spec = read_base_dir(write(tmp_path))
    assert paths(tmp_path) == {
        "lm_head": ("linear", 16, 32),
        "model.embed_tokens": ("embedding", 32, 16),
        "model.layers.0.mlp.gate_up_proj": ("linear", 16, 48),
        "model.layers.0.self_attn.q_proj": ("linear", 16, 16),
    }
    assert (spec.dtype, spec.architecture, spec.vocab_size, spec.max_positions) == ("F32", "LlamaForCausalLM", 32, 128)
    assert spec.weights_digest == sha256_digest((tmp_path / "model.safetensors").read_bytes())
    assert spec.config_digest == sha256_digest((tmp_path / "config.json").read_bytes())
    assert spec.tokenizer_digest == sha256_digest(b"{}")
    assert not spec.tied_embeddings
    assert read_base_dir(tmp_path) == spec


@pytest.mark.parametrize(("head", "said"), [(False, ...), (False, True), (True, True)])
def test_a_tied_head_is_no_module(tmp_path: Path, head: bool, said: Any) -> None:
    write(tmp_path, checkpoint(head=head), tie_word_embeddings=said)
    assert read_base_dir(tmp_path).tied_embeddings
    assert "lm_head" not in paths(tmp_path)


def test_a_checkpoint_of_the_bare_decoder_gets_the_prefix(tmp_path: Path) -> None:
    write(tmp_path, checkpoint(head=False, prefix=""))
    assert LAYER + "self_attn.q_proj" in paths(tmp_path)


def test_gpt2_is_transposed(tmp_path: Path) -> None:
    tensors = {
        "wte.weight": np.ones((32, 16), np.float32),
        "wpe.weight": np.ones((128, 16), np.float32),
        "h.0.attn.c_attn.weight": np.ones((16, 48), np.float32),
    }
    write(
        tmp_path,
        tensors,
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        max_position_embeddings=...,
        n_positions=128,
    )
    spec = read_base_dir(tmp_path)
    assert BaseModule("transformer.h.0.attn.c_attn", "linear", 16, 48, True) in spec.modules
    assert spec.max_positions == 128


def test_experts_are_no_modules(tmp_path: Path) -> None:
    tensors = checkpoint() | {LAYER + "mlp.experts.0.up_proj.weight": np.ones((4, 16), np.float32)}
    assert not any("experts" in path for path in paths(write(tmp_path, tensors)))


def test_shards_give_the_table_of_the_whole(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    write(whole)
    write(parts)
    (parts / "model.safetensors").unlink()
    names = list(checkpoint())
    weight_map = {}
    for number, chosen in enumerate((names[:3], names[3:])):
        file = f"model-{number}.safetensors"
        (parts / file).write_bytes(pack(*entries({name: checkpoint()[name] for name in chosen})))
        weight_map.update(dict.fromkeys(chosen, file))
    (parts / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    one, two = read_base_dir(whole), read_base_dir(parts)
    assert one.modules == two.modules
    digests = {file: sha256_digest((parts / file).read_bytes()) for file in set(weight_map.values())}
    assert two.weights_digest == sha256_digest(canonical(digests))
    assert base_id(one) != base_id(two)
    (parts / "model-1.safetensors").write_bytes((parts / "model-0.safetensors").read_bytes())
    with pytest.raises(BaseModelError, match="second time"):
        read_base_dir(parts)
    for evil in ("../x.safetensors", "/etc/x.safetensors", "x.bin", 1):
        (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": evil}}))
        with pytest.raises(BaseModelError, match="no file beside it"):
            read_base_dir(parts)


def test_tokenizers_in_parts(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text("{}")
    one = read_base_dir(tmp_path).tokenizer_digest
    (tmp_path / "merges.txt").write_text("")
    assert read_base_dir(tmp_path).tokenizer_digest != one


def test_the_dtype_of_most_bytes(tmp_path: Path) -> None:
    assert read_base_dir(write(tmp_path, dtype="BF16")).dtype == "BF16"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ...}, "not a causal language model"),
        ({"architectures": ["BertModel"]}, "not a causal language model"),
        ({"architectures": "LlamaForCausalLM"}, "not a causal language model"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_bad_configs(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BaseModelError, match=text) as caught:
        read_base_dir(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="not a directory"):
        read_base_dir(tmp_path / "absent")
    with pytest.raises(BaseModelError, match=r"config\.json is missing"):
        read_base_dir(tmp_path)
    write(tmp_path, checkpoint(head=False), tie_word_embeddings=False)
    with pytest.raises(BaseModelError, match="no weight for it"):
        read_base_dir(tmp_path)
    write(tmp_path, {"model.norm.weight": np.ones(4, np.float32)})
    with pytest.raises(BaseModelError, match="no linear module"):
        read_base_dir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04")
    with pytest.raises(BaseModelError, match="not a safetensors file"):
        read_base_dir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pack({"a.weight": 1}))
    with pytest.raises(BaseModelError, match="not a legal safetensors file"):
        read_base_dir(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BaseModelError, match="has neither"):
        read_base_dir(tmp_path)
    (tmp_path / "config.json").write_text("{'a': 1}")
    with pytest.raises(BaseModelError, match="not a legal config"):
        read_base_dir(tmp_path)


def test_json_round_trip() -> None:
    spec = small_base()
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec
    assert canonical(to_json(spec))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "x"}, {"more": 1}, {"weights_digest": "x"}, {"dtype": ""}, {"vocab_size": True}, {"max_positions": 0},
        {"tied_embeddings": 1}, {"modules": {}}, {"modules": [1]}, {"modules": list(reversed(to_json(small_base())["modules"]))},
        *({"modules": [{**to_json(small_base())["modules"][0], **bad}]} for bad in (
            {"path": ""}, {"kind": "conv"}, {"in_features": 0}, {"fan_in_fan_out": 0}, {"more": 1})),
    ],
)  # fmt: skip
def test_json_that_is_no_base(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|not|unknown"):
        from_json({**to_json(small_base()), **change})
