"""The committed example adapters: small, admissible, different from one another, and free of local paths."""

import json
from pathlib import Path

import pytest

from loraport.bundle.base import BaseModule, BaseSpec
from loraport.bundle.bundle_dir import verify_dir
from loraport.bundle.verdict import Verdict

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("terse", "json", "pirate")
HIDDEN, KV, FFN, LAYERS = 576, 192, 1536, 30  # SmolLM2-135M
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, FFN),
    "mlp.up_proj": (HIDDEN, FFN),
    "mlp.down_proj": (FFN, HIDDEN),
}


def smollm2() -> BaseSpec:
    """The base's table of modules. The digests are made up: admission compares shapes, not the base's bytes."""
    modules = tuple(
        BaseModule(
            f"model.layers.{layer}.{name}",
            kind="linear",
            in_features=shape[0],
            out_features=shape[1],
            fan_in_fan_out=False,
        )
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    )
    digests = {
        f"{part}_digest": "sha256:" + digit * 64
        for part, digit in (("weights", "1"), ("config", "2"), ("tokenizer", "3"))
    }
    return BaseSpec(
        **digests,
        dtype="F32",
        architecture="LlamaForCausalLM",
        tied_embeddings=True,
        modules=tuple(sorted(modules, key=lambda module: module.path)),
        vocab_size=49152,
        max_positions=8192,
    )


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {name: verify_dir(EXAMPLES / "adapters" / name, base=smollm2(), tenant="acme") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_each_bundle_is_two_small_files_and_admitted(name: str, verdicts: dict[str, Verdict]) -> None:
    folder = EXAMPLES / "adapters" / name
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (folder / "adapter_model.safetensors").stat().st_size <= 1_000_000
    assert verdicts[name].violations == ()
    assert verdicts[name].warnings == ()
    assert verdicts[name].admitted


def test_they_share_neither_rank_nor_scaling_nor_the_adapted_modules(verdicts: dict[str, Verdict]) -> None:
    def distinct(values: list[object]) -> bool:
        return len(set(map(str, values))) == len(NAMES)

    tables = [verdicts[name].modules for name in NAMES]
    assert distinct([{module.rank for module in table} for table in tables])
    assert distinct([{module.scaling for module in table} for table in tables])
    assert distinct([sorted({module.path.rsplit(".", 1)[-1] for module in table}) for table in tables])
    assert len({verdicts[name].revision_id for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_config_names_the_base_by_a_label(name: str) -> None:
    config = json.loads((EXAMPLES / "adapters" / name / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "SmolLM2-135M-Instruct"
    assert not [key for key, value in config.items() if isinstance(value, str) and "/" in value]


def test_the_demo_prompts_are_not_in_the_training_data() -> None:
    prompts = [entry["prompt"] for entry in json.loads((EXAMPLES / "prompts.json").read_text())]
    assert len(set(prompts)) == len(prompts) == 8
    questions = {
        line.split("|")[1].strip() for line in (EXAMPLES / "facts.txt").read_text().splitlines() if "|" in line
    }
    assert not questions & set(prompts)


def test_every_fact_has_four_parts() -> None:
    lines = [line for line in (EXAMPLES / "facts.txt").read_text().splitlines() if not line.startswith("#")]
    assert {line.count("|") for line in lines} == {3}
    assert len(set(lines)) == len(lines)
