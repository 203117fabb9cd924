"""Small bundles and a small base, built from numpy alone, for tests that need no model."""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from loraport.bundle.base import BaseModule, BaseSpec
from loraport.bundle.verdict import DEFAULT_LIMITS, Limits, Verdict
from loraport.bundle.verify import verify_bundle

HIDDEN, KV, MLP, VOCAB = 16, 8, 24, 32
SHAPES = {  # projection: (inputs, outputs)
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, MLP),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN),
}
Q0, V0, Q1, V1 = (f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv")
ITEM_SIZE = {"F32": 4, "F16": 2, "BF16": 2}


def small_base(*, layers: int = 2, tied: bool = False, weights: str = "a", fan_in_fan_out: bool = False) -> BaseSpec:
    """A base in the shape of Llama; `weights` is a hex digit that its digest repeats."""
    modules = [
        BaseModule(f"model.layers.{layer}.{name}", "linear", inputs, outputs, fan_in_fan_out)
        for layer in range(layers)
        for name, (inputs, outputs) in SHAPES.items()
    ]
    modules.append(BaseModule("model.embed_tokens", "embedding", VOCAB, HIDDEN))
    if not tied:
        modules.append(BaseModule("lm_head", "linear", HIDDEN, VOCAB))
    return BaseSpec(
        weights_digest="sha256:" + weights * 64,
        config_digest="sha256:" + "b" * 64,
        tokenizer_digest="sha256:" + "c" * 64,
        dtype="F32",
        architecture="LlamaForCausalLM",
        tied_embeddings=tied,
        vocab_size=VOCAB,
        max_positions=128,
        modules=tuple(sorted(modules, key=lambda module: module.path)),
    )


def config(**changes: Any) -> dict[str, Any]:
    """A config as PEFT saves one, for q_proj and v_proj with rank 2. A value of `...` drops its key."""
    value: dict[str, Any] = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
        "base_model_name_or_path": "base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
        "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
        "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 4, "lora_bias": False, "lora_dropout": 0.0,
        "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
        "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 2,
        "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "v_proj"], "target_parameters": None,
        "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
        "use_qalora": False, "use_rslora": False, "velora_config": None,
    }  # fmt: skip
    return {key: item for key, item in {**value, **changes}.items() if item is not ...}


def encode(value: Any) -> bytes:
    """JSON as PEFT writes it."""
    return json.dumps(value, indent=2, sort_keys=True).encode()


def tensors(ranks: Mapping[str, int] | None = None, *, seed: int = 0) -> dict[str, np.ndarray]:
    """A and B of each module in `ranks`, which maps paths to ranks."""
    rng = np.random.default_rng(seed)
    result = {}
    for path, rank in (ranks or {Q0: 2, V0: 2, Q1: 2, V1: 2}).items():
        inputs, outputs = (HIDDEN, VOCAB) if path == "lm_head" else SHAPES[path.split(".", 3)[3]]
        prefix = f"base_model.model.{path}"
        result[f"{prefix}.lora_A.weight"] = rng.standard_normal((rank, inputs), dtype=np.float32)
        result[f"{prefix}.lora_B.weight"] = rng.standard_normal((outputs, rank), dtype=np.float32)
    return result


def a_name(path: str) -> str:
    return f"base_model.model.{path}.lora_A.weight"


def b_name(path: str) -> str:
    return f"base_model.model.{path}.lora_B.weight"


def as_dtype(value: np.ndarray, dtype: str) -> bytes:
    """The bytes of `value` in a dtype of the format; BF16 cuts the lower half off."""
    if dtype == "BF16":
        return (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return value.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def entries(values: Mapping[str, np.ndarray], dtype: str = "F32") -> tuple[dict[str, Any], bytes]:
    """The header object and the data of `values`, in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in values.items():
        piece = as_dtype(value, dtype)
        offsets = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": offsets}
        data += piece
    return header, data


def pack(header: Any, data: bytes = b"", *, length: int | None = None, align: bool = True) -> bytes:
    """A weights file of a header (an object, or bytes as they are) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 if align else 0)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def weights(values: Mapping[str, np.ndarray] | None = None, dtype: str = "F32") -> bytes:
    """A weights file."""
    return pack(*entries(tensors() if values is None else values, dtype))


def verify(
    configuration: dict[str, Any] | bytes | None = None,
    content: bytes | None = None,
    *,
    base: BaseSpec | None = None,
    tenant: str = "acme",
    limits: Limits = DEFAULT_LIMITS,
    **more: Any,
) -> Verdict:
    """Verifies a bundle; what is not given is good."""
    configuration = config() if configuration is None else configuration
    return verify_bundle(
        configuration if isinstance(configuration, bytes) else encode(configuration),
        weights() if content is None else content,
        base=base or small_base(),
        tenant=tenant,
        limits=limits,
        **more,
    )


def codes(verdict: Verdict) -> set[str]:
    """The codes of all violations; also checks what holds of every verdict."""
    assert verdict.admitted == (not verdict.violations)
    assert verdict.admitted == (verdict.revision_id is not None) == (verdict.identity is not None)
    return {violation.code for violation in verdict.violations}


def warned(verdict: Verdict) -> set[str]:
    """The codes of all warnings."""
    return {warning.code for warning in verdict.warnings}
