"""Every reason for which a bundle is refused, and every warning, with one line for a person.

Codes are stable: scripts may compare them. The detail of a violation names the offender and may change.
"""

VIOLATIONS: dict[str, str] = {
    # What lies in the bundle
    "NO_CONFIG": "adapter_config.json is missing",
    "NO_WEIGHTS": "adapter_model.safetensors is missing",
    "EMPTY_FILE": "a file has no bytes",
    "FILE_TOO_LARGE": "the weights file is larger than allowed",
    "PICKLE_ONLY": "the weights exist only in a format that is never opened, such as a pickle",
    "BAD_FILE": "a file of the bundle is not a plain file of its own: a link, a device or a folder",
    # Reading the config
    "CONFIG_TOO_LARGE": "the config is larger than allowed",
    "CONFIG_NOT_UTF8": "the config is not UTF-8 text",
    "CONFIG_NOT_JSON": "the config is not JSON",
    "CONFIG_NOT_OBJECT": "the config is JSON, but not an object",
    "CONFIG_DUPLICATE_KEY": "a key occurs twice in one object, so two readers may see different configs",
    "CONFIG_TOO_DEEP": "the config is nested too deeply",
    "CONFIG_NON_FINITE_NUMBER": "the config holds NaN or Infinity, which are not JSON",
    "CONFIG_NUMBER_RANGE": "a number of the config is too large to be read exactly",
    "CONFIG_LONE_SURROGATE": "a text of the config holds half of a surrogate pair",
    # What the config says
    "CONFIG_MISSING_KEY": "a key without which the scale or kind of the adapter would be a guess is missing",
    "CONFIG_UNKNOWN_KEY": "a key that this version does not know, and that could change the meaning",
    "CONFIG_WRONG_TYPE": "a value of the config has the wrong JSON type",
    "CONFIG_BAD_VALUE": "a value of the config is outside its range",
    "CONFIG_CONFLICT": "two keys of the config contradict each other",
    "NON_LITERAL_PATTERN": "a pattern is a regular expression; only literal module names are resolved",
    "AMBIGUOUS_PATTERN": "two patterns give one module different values, and their order would decide",
    "UNMATCHED_PATTERN": "a pattern with dots names no module of the base",
    "TARGET_MISMATCH": "the file adapts a module that the config does not target",
    "MISSING_MODULE": "the config targets a module for which the file has no tensors",
    "FAN_IN_FAN_OUT_MISMATCH": "fan_in_fan_out does not match the layout of the base's weight",
    "RANK_LIMIT": "a rank is above the limit",
    "SCALING_LIMIT": "the scale of a module is above the limit",
    # Reading the header of the weights
    "HEADER_LENGTH": "the header length is zero, or larger than the file",
    "HEADER_TOO_LARGE": "the header is larger than allowed",
    "HEADER_NOT_UTF8": "the header is not UTF-8 text",
    "HEADER_NOT_JSON": "the header is not a JSON object that begins with {",
    "HEADER_DUPLICATE_KEY": "a key occurs twice in one object of the header",
    "HEADER_TOO_DEEP": "the header is nested too deeply",
    "HEADER_NON_FINITE_NUMBER": "the header holds NaN or Infinity",
    "HEADER_NUMBER_RANGE": "a number of the header is too large",
    "HEADER_FLOAT_NOT_ALLOWED": "the header holds a number that is not an integer",
    "HEADER_LONE_SURROGATE": "a text of the header holds half of a surrogate pair",
    "HEADER_TOO_MANY_TENSORS": "the header lists more tensors than allowed",
    "HEADER_METADATA": "__metadata__ is not a small object of texts",
    "HEADER_NAME": "a tensor name is empty, too long, or has characters that are not allowed",
    "HEADER_ENTRY": "an entry has not exactly dtype, shape and data_offsets of the right types",
    "HEADER_SHAPE": "a dimension is below 1 or above the limit",
    "HEADER_OFFSETS": "the offsets of a tensor are reversed or do not span its shape",
    "HEADER_OVERLAP": "a tensor begins within another",
    "HEADER_HOLE": "bytes between tensors belong to none of them",
    "HEADER_TRAILING_BYTES": "bytes after the last tensor belong to none",
    "HEADER_UNALIGNED": "the tensors do not begin at a multiple of 8 bytes",
    "DATA_TRUNCATED": "the file ends before the last tensor does",
    "DUPLICATE_TENSOR": "a tensor is listed twice, so two readers may see different weights",
    "UNKNOWN_DTYPE": "a dtype that the format does not have",
    "UNSUPPORTED_DTYPE": "a dtype other than F32, F16 and BF16",
    "MIXED_DTYPE": "the tensors do not all have one dtype",
    # What the tensors are
    "NO_TENSORS": "the file holds no adapter tensors",
    "UNKNOWN_TENSOR": "a tensor that belongs to no module of the base",
    "INCOMPLETE_PAIR": "a module has A without B, or B without A",
    "SHAPE_MISMATCH": "the shape of a tensor does not fit its module",
    "RANK_MISMATCH": "the ranks of A, B and the config disagree",
    "WRONG_BASE_SHAPE": "no module fits: the adapter was made for a base of another shape",
    # What the tensors hold
    "NON_FINITE": "a tensor holds NaN or infinity",
    "VALUE_OVERFLOW": "a value becomes infinite in the dtype that is served",
    "UPDATE_OVERFLOW": "A, B or their scaled product can overflow",
    "UPDATE_NORM": "the scaled product of A and B is far larger than any honest one",
    # Known to the format, but not served
    "UNSUPPORTED_PEFT_TYPE": "another kind of adapter than LORA",
    "UNSUPPORTED_FORMAT": "files of another tool, which must be exported to the PEFT format first",
    "UNSUPPORTED_ALORA": "activated LoRA (alora_invocation_tokens)",
    "UNSUPPORTED_ARROW": "Arrow routing over adapters (arrow_config)",
    "UNSUPPORTED_AUTO_MAPPING": "auto_mapping, which would import code",
    "UNSUPPORTED_BDLORA": "block-diagonal LoRA (use_bdlora)",
    "UNSUPPORTED_BIAS": "trained biases of the base (bias is not none)",
    "UNSUPPORTED_DORA": "DoRA (use_dora, lora_magnitude_vector)",
    "UNSUPPORTED_FULL_WEIGHT": "a full replacement of a weight of the base",
    "UNSUPPORTED_INIT": "an initialisation that changed the base's weights; convert the adapter to plain LoRA",
    "UNSUPPORTED_KASA": "KaSA (kasa_config), which truncates the base's weights",
    "UNSUPPORTED_LAYER_REPLICATION": "layer_replication, which changes the model",
    "UNSUPPORTED_LORA_BIAS": "a bias on B (lora_bias)",
    "UNSUPPORTED_MEGATRON": "megatron_config or megatron_core, which would import code",
    "UNSUPPORTED_MODULE": "a kind of module that the executors do not serve",
    "UNSUPPORTED_MODULES_TO_SAVE": "modules_to_save, full copies of modules",
    "UNSUPPORTED_MONTECLORA": "MonteCLoRA (monteclora_config), which samples",
    "UNSUPPORTED_PARAMETERS": "LoRA on bare parameters, such as MoE experts (target_parameters)",
    "UNSUPPORTED_QALORA": "QALoRA (use_qalora)",
    "UNSUPPORTED_RUNTIME_CONFIG": "runtime_config",
    "UNSUPPORTED_TIED_HEAD": "LoRA on an output head that is tied to the embedding",
    "UNSUPPORTED_TOKEN_DELTA": "trained rows of the embedding (trainable_token_indices)",
    "UNSUPPORTED_VELORA": "VeLoRA (velora_config)",
    "UNSUPPORTED_WEIGHT_TYING": "ensure_weight_tying",
    # The report itself
    "MORE_VIOLATIONS": "further violations that are not listed",
}

WARNINGS: dict[str, str] = {
    "IGNORED_FILE": "a further file in the bundle; it is not opened",
    "IGNORED_TOKENIZER": "a tokenizer or chat template in the bundle; the base's own is used",
    "NO_EFFECT": "B is zero, so the base's own answers will be given",
    "DENORMALS": "many values are so small that they slow down a CPU",
    "TARGET_NOT_CHECKED": "target_modules is a pattern or missing; the tensors alone decide",
    "UNUSED_PATTERN": "a rank or alpha pattern matches no adapted module",
}


def explain(code: str) -> str:
    """Returns the one-line meaning of a violation or warning.

    Raises:
        KeyError: there is no such code.
    """
    return VIOLATIONS[code] if code in VIOLATIONS else WARNINGS[code]
