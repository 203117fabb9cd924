"""Adapters that PEFT itself saves: plain ones get PEFT's own modules and scales, variants are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from loraport.bundle.base import BaseSpec
from loraport.bundle.base_dir import read_base_dir
from loraport.bundle.bundle_dir import verify_dir
from tests.bundle_files import codes

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

QV = ["q_proj", "v_proj"]
# A small vocabulary of shapes: no two dimensions of one module are equal except those of q_proj.
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BaseSpec]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder, read_base_dir(folder)


def saved(base: Path, folder: Path, *, embeddings: Any = False, **lora: Any) -> dict[str, float]:
    """Saves a fresh adapter with a B that is not zero; returns PEFT's scale of every adapted module."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8, **lora}))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    wrapped.save_pretrained(folder, save_embedding_layers=embeddings)
    return {
        name.removeprefix("base_model.model."): module.scaling["default"]
        for name, module in wrapped.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


PLAIN: list[dict[str, Any]] = [
    {"target_modules": QV},
    {"target_modules": QV, "lora_alpha": 11.5},
    {"target_modules": "all-linear"},
    {"target_modules": ["lm_head", "down_proj"]},
    {"target_modules": ["embed_tokens", "q_proj"]},
    {"target_modules": ["layers.1.self_attn.q_proj", "model.layers.2.mlp.up_proj"]},
    {"target_modules": QV, "layers_to_transform": [0, 2]},
    {"target_modules": QV, "layers_to_transform": 1, "layers_pattern": "layers"},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [2]},
    {"target_modules": "all-linear", "exclude_modules": ["layers.0.mlp.up_proj", "k_proj"]},
    {"target_modules": QV, "rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 8}, "use_rslora": True},
    {"target_modules": QV, "alpha_pattern": {"v_proj": 3, "layers.0.self_attn.q_proj": 24}},
    {"target_modules": QV, "rank_pattern": {"v_proj": 7}, "alpha_pattern": {"v_proj": 5}, "use_rslora": True},
    {"target_modules": QV, "init_lora_weights": "gaussian"},
    {"target_modules": QV, "init_lora_weights": "orthogonal"},
    {"target_modules": r".*\.(q|v)_proj"},
]


@pytest.mark.parametrize("lora", PLAIN, ids=lambda lora: "-".join(lora))
def test_plain_adapters(lora: dict[str, Any], base: tuple[Path, BaseSpec], tmp_path: Path) -> None:
    scales = saved(base[0], tmp_path, **lora)
    verdict = verify_dir(tmp_path, base=base[1], tenant="acme")
    assert codes(verdict) == set(), verdict.violations
    assert {module.path: module.scaling for module in verdict.modules} == scales
    assert scales


VARIANTS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "UNSUPPORTED_DORA"),
    ({"bias": "all"}, "UNSUPPORTED_BIAS"),
    ({"lora_bias": True}, "UNSUPPORTED_LORA_BIAS"),
    ({"modules_to_save": ["lm_head"]}, "UNSUPPORTED_MODULES_TO_SAVE"),
    ({"modules_to_save": ["lm_head"]}, "UNSUPPORTED_FULL_WEIGHT"),
    ({"trainable_token_indices": [1, 2]}, "UNSUPPORTED_TOKEN_DELTA"),
    ({"init_lora_weights": "olora"}, "UNSUPPORTED_INIT"),
    ({"init_lora_weights": "pissa"}, "UNSUPPORTED_INIT"),
    ({"alora_invocation_tokens": [1, 2]}, "UNSUPPORTED_ALORA"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "UNSUPPORTED_LAYER_REPLICATION"),
    ({"target_modules": [], "target_parameters": ["q_proj.weight"]}, "UNSUPPORTED_PARAMETERS"),
]


def test_a_head_saved_along_with_its_adapter(base: tuple[Path, BaseSpec], tmp_path: Path) -> None:
    """PEFT's default also writes the whole head; the reason says how to save without it."""
    saved(base[0], tmp_path, embeddings="auto", target_modules=["lm_head"])
    verdict = verify_dir(tmp_path, base=base[1], tenant="acme")
    assert codes(verdict) == {"UNSUPPORTED_FULL_WEIGHT"}
    assert "save_embedding_layers=False" in verdict.violations[0].detail


@pytest.mark.parametrize(("lora", "code"), VARIANTS, ids=[f"{next(iter(lora))}-{code}" for lora, code in VARIANTS])
def test_variants(lora: dict[str, Any], code: str, base: tuple[Path, BaseSpec], tmp_path: Path) -> None:
    saved(base[0], tmp_path, **{"target_modules": QV, **lora})
    assert code in codes(verify_dir(tmp_path, base=base[1], tenant="acme"))
