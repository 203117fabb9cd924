"""The module table read from files equals the modules of the model that transformers builds from them."""

from pathlib import Path
from typing import Any

import pytest

from loraport.bundle.base_dir import read_base_dir

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
GLU = {**SMALL, "intermediate_size": 24, "num_key_value_heads": 1}
GPT = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", GLU),
    ("Llama", {**GLU, "tie_word_embeddings": True}),
    ("Mistral", GLU),
    ("Qwen2", GLU),
    ("Qwen3", {**GLU, "head_dim": 8}),
    ("Gemma", {**GLU, "head_dim": 8}),
    ("Gemma2", {**GLU, "head_dim": 8}),
    ("Gemma3Text", {**GLU, "head_dim": 8}),
    ("Phi3", {**GLU, "pad_token_id": 0}),
    ("Phi", GLU),
    ("Olmo2", {**GLU, "pad_token_id": 0}),
    ("SmolLM3", {**GLU, "pad_token_id": 0}),
    ("Granite", GLU),
    ("Cohere", {**GLU, "use_qk_norm": True, "pad_token_id": 0}),
    ("OPT", {**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    ("GPTNeoX", {**SMALL, "intermediate_size": 24}),
    ("GPT2", GPT),
    ("GPTJ", {**GPT, "rotary_dim": 4}),
]


def modules_of(model: Any) -> dict[str, tuple[str, int, int, bool]]:
    """What PEFT could wrap: linear layers, transposed linear layers and embeddings."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[path] = ("linear", module.in_features, module.out_features, False)
        elif isinstance(module, Conv1D):
            found[path] = ("linear", module.nx, module.nf, True)
        elif isinstance(module, torch.nn.Embedding):
            found[path] = ("embedding", *module.weight.shape, False)
    return found


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[f"{f}-{len(s)}" for f, s in FAMILIES])
@pytest.mark.parametrize("sharded", [False, True])
def test_table(family: str, settings: dict[str, Any], sharded: bool, tmp_path: Path) -> None:
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="4KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors").exists() != sharded
    spec = read_base_dir(tmp_path)
    expected = modules_of(model)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert spec.tied_embeddings == tied
    if tied:
        head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
        del expected[head]
    table = {m.path: (m.kind, m.in_features, m.out_features, m.fan_in_fan_out) for m in spec.modules}
    assert table == expected
    assert (spec.dtype, spec.vocab_size, spec.max_positions) == ("F32", 64, 32)
