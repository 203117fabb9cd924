"""Configs that are refused: one case for each way in which a key can lie, and for JSON that has two readings."""

from collections.abc import Iterator

from tests.bundle_files import config, encode
from tests.security.corpus import Q0, V0, Case, Kit


def cases(kit: Kit) -> Iterator[Case]:
    """All cases about adapter_config.json."""
    yield from _scale(kit)
    yield from _patterns(kit)
    yield from _targets(kit)
    yield from _variants(kit)
    yield from _imports(kit)
    yield from _kinds(kit)
    yield from _json(kit)


def _scale(kit: Kit) -> Iterator[Case]:
    yield kit.configured("A2", "alpha missing", "CONFIG_MISSING_KEY", "lora_alpha", lora_alpha=...)
    yield kit.configured("A2", "alpha null", "CONFIG_WRONG_TYPE", "lora_alpha", lora_alpha=None)
    yield kit.configured("A2", "alpha in quotes", "CONFIG_WRONG_TYPE", "lora_alpha", lora_alpha="16")
    yield kit.configured("A2", "alpha true", "CONFIG_WRONG_TYPE", "lora_alpha", lora_alpha=True)
    yield kit.configured("A2", "alpha a list", "CONFIG_WRONG_TYPE", "lora_alpha", lora_alpha=[16])
    yield kit.configured("A2", "alpha negative", "CONFIG_BAD_VALUE", "lora_alpha", lora_alpha=-16)
    yield kit.configured("A2", "alpha zero", "CONFIG_BAD_VALUE", "lora_alpha", lora_alpha=0.0)
    yield kit.configured("G1", "alpha giant", "SCALING_LIMIT", Q0, lora_alpha=1_000_000)
    yield kit.configured("G1", "alpha near the largest double", "SCALING_LIMIT", Q0, lora_alpha=1.7e308)
    yield kit.configured("G1", "alpha whose ratio is zero", "SCALING_LIMIT", V0, lora_alpha=5e-324)
    yield kit.configured(
        "A1", "scale over the limit only by rslora", "SCALING_LIMIT", Q0, lora_alpha=100, use_rslora=True
    )
    yield kit.configured("A1", "rslora in quotes", "CONFIG_WRONG_TYPE", "use_rslora", use_rslora="false")
    yield kit.configured("A1", "rslora a number", "CONFIG_WRONG_TYPE", "use_rslora", use_rslora=0)
    yield kit.configured("A1", "rslora null", "CONFIG_WRONG_TYPE", "use_rslora", use_rslora=None)
    yield kit.configured("A2", "rank missing", "CONFIG_MISSING_KEY", "r", r=...)
    yield kit.configured("G1", "rank negative", "CONFIG_BAD_VALUE", "r", r=-8)
    yield kit.configured("G1", "rank zero", "CONFIG_BAD_VALUE", "r", r=0)
    yield kit.configured("A2", "rank a float", "CONFIG_WRONG_TYPE", "r", r=2.0)
    yield kit.configured("A2", "rank true", "CONFIG_WRONG_TYPE", "r", r=True)
    yield kit.configured("G1", "rank beyond the limit", "RANK_LIMIT RANK_MISMATCH", "512", r=512, lora_alpha=512)
    yield kit.configured("A3", "rank of another file", "RANK_MISMATCH", Q0, r=4)


def _patterns(kit: Kit) -> Iterator[Case]:
    long_q = "layers.0.self_attn.q_proj"
    yield kit.configured("A3", "rank pattern against the file", "RANK_MISMATCH", Q0, rank_pattern={"q_proj": 4})
    yield kit.configured(
        "A3", "rank patterns that disagree", "AMBIGUOUS_PATTERN", Q0, rank_pattern={"q_proj": 2, long_q: 4}
    )
    yield kit.configured(
        "A3", "alpha patterns that disagree", "AMBIGUOUS_PATTERN", Q0, alpha_pattern={long_q: 8, "q_proj": 16}
    )
    yield kit.configured(
        "A3",
        "pattern for a layer too many",
        "UNMATCHED_PATTERN",
        "layers.7",
        rank_pattern={"layers.7.self_attn.q_proj": 2},
    )
    yield kit.configured(
        "A3", "alpha pattern for nothing", "UNMATCHED_PATTERN", "model.decoder.q", alpha_pattern={"model.decoder.q": 2}
    )
    for name, pattern in {
        "exponential": "((a|a)*b)",
        "nested quantifier": "(x+x+)+y",
        "any layer": r".*\.q_proj",
        "anchored": "^model.layers.0.self_attn.q_proj$",
        "character class": "[qv]_proj",
        "look-ahead": "(?=q_proj)q_proj",
        "empty": "",
    }.items():
        offender = pattern or "rank_pattern"
        yield kit.configured(
            "§5", f"regex in a pattern: {name}", "NON_LITERAL_PATTERN", offender[:12], rank_pattern={pattern: 2}
        )
    yield kit.configured(
        "§5", "regex in an alpha pattern", "NON_LITERAL_PATTERN", "alpha_pattern", alpha_pattern={r"(.*)+\.v_proj": 2}
    )
    yield kit.configured("A3", "pattern value true", "CONFIG_WRONG_TYPE", "rank_pattern", rank_pattern={"q_proj": True})
    yield kit.configured(
        "A3", "pattern value in quotes", "CONFIG_WRONG_TYPE", "alpha_pattern", alpha_pattern={"q_proj": "8"}
    )
    yield kit.configured(
        "A3", "pattern value negative", "CONFIG_BAD_VALUE", "rank_pattern", rank_pattern={"q_proj": -2}
    )
    yield kit.configured(
        "A3", "pattern a list of pairs", "CONFIG_WRONG_TYPE", "rank_pattern", rank_pattern=[["q_proj", 2]]
    )
    yield kit.configured("A3", "pattern alpha giant", "SCALING_LIMIT", Q0, alpha_pattern={"q_proj": 1e12})
    yield kit.configured(
        "A3", "pattern rank beyond the limit", "RANK_LIMIT RANK_MISMATCH", "4096", rank_pattern={"q_proj": 4096}
    )


def _targets(kit: Kit) -> Iterator[Case]:
    yield kit.configured("B2", "file adapts more than is targeted", "TARGET_MISMATCH", V0, target_modules=["q_proj"])
    yield kit.configured(
        "B2",
        "file adapts less than is targeted",
        "MISSING_MODULE",
        "o_proj",
        target_modules=["q_proj", "v_proj", "o_proj"],
    )
    yield kit.configured("B2", "file adapts what is excluded", "TARGET_MISMATCH", Q0, exclude_modules=["q_proj"])
    yield kit.configured(
        "B2", "file adapts a layer that is not transformed", "TARGET_MISMATCH", Q0, layers_to_transform=[1]
    )
    yield kit.configured(
        "B2", "targets of another family", "TARGET_MISMATCH", Q0, target_modules=["query_key_value", "dense"]
    )
    yield kit.configured("B2", "targets a number", "CONFIG_WRONG_TYPE", "target_modules", target_modules=7)
    yield kit.configured(
        "B2", "targets hold null", "CONFIG_WRONG_TYPE", "target_modules", target_modules=["q_proj", None]
    )
    yield kit.configured(
        "§3",
        "layers for a pattern of targets",
        "CONFIG_CONFLICT",
        "layers_to_transform",
        target_modules="all-linear",
        layers_to_transform=[0, 1],
    )
    yield kit.configured("§3", "layers pattern alone", "CONFIG_CONFLICT", "layers_pattern", layers_pattern="layers")
    yield kit.configured("§3", "layers true", "CONFIG_WRONG_TYPE", "layers_to_transform", layers_to_transform=[True])
    yield kit.configured("§3", "layers negative", "CONFIG_BAD_VALUE", "layers_to_transform", layers_to_transform=[-1])
    yield kit.configured(
        "§5",
        "regex of layers",
        "NON_LITERAL_PATTERN",
        "layers_pattern",
        layers_to_transform=[0, 1],
        layers_pattern="(.*)*layers",
    )
    yield kit.configured("B6", "transposed base claimed", "FAN_IN_FAN_OUT_MISMATCH", Q0, fan_in_fan_out=True)
    yield kit.configured("§3", "task type unknown", "CONFIG_BAD_VALUE", "task_type", task_type="CHAT")
    yield kit.configured("§3", "inference mode in quotes", "CONFIG_WRONG_TYPE", "inference_mode", inference_mode="yes")
    yield kit.configured("§3", "dropout above one", "CONFIG_BAD_VALUE", "lora_dropout", lora_dropout=1.5)


def _variants(kit: Kit) -> Iterator[Case]:
    set_to = {
        "use_dora": (True, "UNSUPPORTED_DORA"),
        "lora_bias": (True, "UNSUPPORTED_LORA_BIAS"),
        "use_qalora": (True, "UNSUPPORTED_QALORA"),
        "use_bdlora": ({"target_modules_bd_a": []}, "UNSUPPORTED_BDLORA"),
        "modules_to_save": (["lm_head"], "UNSUPPORTED_MODULES_TO_SAVE"),
        "trainable_token_indices": ([3, 5], "UNSUPPORTED_TOKEN_DELTA"),
        "target_parameters": (["mlp.experts.gate_up_proj"], "UNSUPPORTED_PARAMETERS"),
        "layer_replication": ([[0, 2], [1, 2]], "UNSUPPORTED_LAYER_REPLICATION"),
        "alora_invocation_tokens": ([7, 8], "UNSUPPORTED_ALORA"),
        "arrow_config": ({"top_k": 3}, "UNSUPPORTED_ARROW"),
        "velora_config": ({"groups": 4}, "UNSUPPORTED_VELORA"),
        "monteclora_config": ({"samples": 2}, "UNSUPPORTED_MONTECLORA"),
        "kasa_config": ({"beta": 0.1}, "UNSUPPORTED_KASA"),
        "ensure_weight_tying": (True, "UNSUPPORTED_WEIGHT_TYING"),
        "runtime_config": ({"ephemeral_gpu_offload": False}, "UNSUPPORTED_RUNTIME_CONFIG"),
    }
    for key, (value, code) in set_to.items():
        yield kit.configured("B6", f"variant {key}", code, key, **{key: value})
    yield kit.configured("B6", "variant dora as a number", "UNSUPPORTED_DORA", "use_dora", use_dora=1)
    yield kit.configured(
        "B6", "modules to save by a regex", "UNSUPPORTED_MODULES_TO_SAVE", "modules_to_save", modules_to_save=["(a+)+"]
    )
    for bias in ("all", "lora_only"):
        yield kit.configured("B6", f"bias {bias}", "UNSUPPORTED_BIAS", "bias", bias=bias)
    yield kit.configured("B6", "bias false", "CONFIG_BAD_VALUE", "bias", bias=False)
    for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "PiSSA"):
        yield kit.configured("§8", f"init {init}", "UNSUPPORTED_INIT", "init_lora_weights", init_lora_weights=init)
    yield kit.configured(
        "§8", "init of the future", "CONFIG_BAD_VALUE", "init_lora_weights", init_lora_weights="quantum"
    )


def _imports(kit: Kit) -> Iterator[Case]:
    yield kit.configured(
        "H2", "import by auto_mapping", "UNSUPPORTED_AUTO_MAPPING", "auto_mapping",
        auto_mapping={"base_model_class": "Popen", "parent_library": "antigravity"},
    )  # fmt: skip
    yield kit.configured(
        "H2", "import by megatron_core", "UNSUPPORTED_MEGATRON", "megatron_core", megatron_core="antigravity"
    )
    yield kit.configured(
        "H2", "import by megatron_config", "UNSUPPORTED_MEGATRON", "megatron_config", megatron_config={"tp": 2}
    )
    yield kit.configured(
        "§3.4",
        "pickle by soft prompt state",
        "CONFIG_UNKNOWN_KEY",
        "prompt_tuning_init_state_dict_path",
        prompt_tuning_init_state_dict_path="/etc/passwd",
    )
    yield kit.configured(
        "§3.4",
        "remote code by tokenizer",
        "CONFIG_UNKNOWN_KEY",
        "tokenizer_kwargs",
        tokenizer_kwargs={"trust_remote_code": True},
    )
    yield kit.configured(
        "§3.4",
        "base model a list",
        "CONFIG_WRONG_TYPE",
        "base_model_name_or_path",
        base_model_name_or_path=["http://169.254.169.254/"],
    )


def _kinds(kit: Kit) -> Iterator[Case]:
    for kind in ("LOHA", "ADALORA", "IA3", "VERA", "XLORA", "OFT", "PROMPT_TUNING", "lora", "Lora ", ""):
        yield kit.configured("B6", f"kind {kind!r}", "UNSUPPORTED_PEFT_TYPE", kind or "peft_type", peft_type=kind)
    yield kit.configured("B6", "kind null", "UNSUPPORTED_PEFT_TYPE", "peft_type", peft_type=None)
    yield kit.configured("B6", "kind a list", "UNSUPPORTED_PEFT_TYPE", "peft_type", peft_type=["LORA"])
    yield kit.configured("B6", "kind missing", "CONFIG_MISSING_KEY", "peft_type", peft_type=...)
    yield kit.configured("B6", "key of the future", "CONFIG_UNKNOWN_KEY", "use_hyperlora", use_hyperlora=True)
    yield kit.configured("B6", "key of the future, unset", "CONFIG_UNKNOWN_KEY", "use_hyperlora", use_hyperlora=None)
    yield kit.configured("B6", "key in other letters", "CONFIG_UNKNOWN_KEY", "Use_DoRA", Use_DoRA=True)
    yield kit.configured("B6", "key with a homoglyph", "CONFIG_UNKNOWN_KEY", "lora_alph", **{"lora_alph\u0430": 64})
    mlx = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 2, "scale": 20.0, "keys": ["q_proj"]}}
    yield kit.case(
        "§10", "config of MLX", "UNSUPPORTED_FORMAT CONFIG_MISSING_KEY CONFIG_UNKNOWN_KEY", "MLX", config=encode(mlx)
    )
    torchtune = {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
        "peft_type": "LORA",
        "lora_attn_modules": ["q_proj"],
    }
    yield kit.case("§10", "config of torchtune", "CONFIG_UNKNOWN_KEY", "lora_attn_modules", config=encode(torchtune))
    nemo = {"peft": {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 2, "alpha": 4}}}
    yield kit.case("§10", "config of NeMo", "CONFIG_MISSING_KEY CONFIG_UNKNOWN_KEY", "peft", config=encode(nemo))


def _json(kit: Kit) -> Iterator[Case]:
    text = encode(config()).decode()

    def case(name: str, code: str, offender: str, data: str | bytes) -> Case:
        return kit.case("§3.3", name, code, offender, config=data.encode() if isinstance(data, str) else data)

    yield case("json: no bytes", "EMPTY_FILE", "adapter_config.json", b"")
    yield case("json: cut short", "CONFIG_NOT_JSON", "character", text[: len(text) // 2])
    yield case("json: YAML", "CONFIG_NOT_JSON", "character 0", "peft_type: LORA\nr: 2\n")
    yield case("json: trailing comma", "CONFIG_NOT_JSON", "character", text.rstrip()[:-1].rstrip() + ",}")
    yield case("json: comment", "CONFIG_NOT_JSON", "character", "// mine\n" + text)
    yield case("json: two documents", "CONFIG_NOT_JSON", "Extra data", text + text)
    yield case("json: single quotes", "CONFIG_NOT_JSON", "double quotes", text.replace('"', "'"))
    yield case("json: a list", "CONFIG_NOT_OBJECT", "object", f"[{text}]")
    yield case("json: null", "CONFIG_NOT_OBJECT", "object", "null")
    yield case("json: byte-order mark", "CONFIG_NOT_JSON", "BOM", b"\xef\xbb\xbf" + text.encode())
    yield case("json: UTF-16", "CONFIG_NOT_UTF8", "byte 0", text.encode("utf-16"))
    yield case("json: Latin-1", "CONFIG_NOT_UTF8", "UTF-8", text.replace("base", "b\xe4se", 1).encode("latin-1"))
    yield case(
        "json: alpha NaN", "CONFIG_NON_FINITE_NUMBER", "NaN", text.replace('"lora_alpha": 4', '"lora_alpha": NaN')
    )
    yield case(
        "json: alpha -Infinity",
        "CONFIG_NON_FINITE_NUMBER",
        "-Infinity",
        text.replace('"lora_alpha": 4', '"lora_alpha": -Infinity'),
    )
    yield case(
        "json: alpha 1e400", "CONFIG_NUMBER_RANGE", "1e400", text.replace('"lora_alpha": 4', '"lora_alpha": 1e400')
    )
    yield case(
        "json: rank of 5000 digits", "CONFIG_NUMBER_RANGE", "5000 digits", text.replace('"r": 2', '"r": ' + "9" * 5000)
    )
    yield case(
        "json: alpha twice", "CONFIG_DUPLICATE_KEY", "lora_alpha", text.rstrip()[:-1].rstrip() + ', "lora_alpha": 64}'
    )
    yield case(
        "json: pattern key twice",
        "CONFIG_DUPLICATE_KEY",
        "q_proj",
        text.replace('"rank_pattern": {}', '"rank_pattern": {"q_proj": 2, "q_proj": 4}'),
    )
    yield case("json: escaped key twice", "CONFIG_DUPLICATE_KEY", "r", text.rstrip()[:-1].rstrip() + ', "\\u0072": 8}')
    yield case("json: half a surrogate pair", "CONFIG_LONE_SURROGATE", "surrogate", text.replace('"base"', '"\\ud800"'))
    yield case("json: 5000 levels", "CONFIG_TOO_DEEP", "deeper", '{"a":' * 5000 + "1" + "}" * 5000)
    yield case("json: 20000 brackets", "CONFIG_TOO_DEEP", "deeper", "[" * 20_000 + "]" * 20_000)
    yield case("json: 1 MiB of spaces", "CONFIG_TOO_LARGE", "65537 bytes", b" " * 2**20)
    yield case("json: a zero byte", "CONFIG_NOT_JSON", "character", text.encode() + b"\0")
