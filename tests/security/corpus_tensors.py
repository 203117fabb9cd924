"""Well-formed files whose tensors are wrong: names, pairs, shapes, values, and what other programs write."""

import math
from collections.abc import Iterator

import numpy as np

from tests.bundle_files import a_name, as_dtype, b_name, encode, entries, pack
from tests.bundle_files import config as config_of
from tests.security.corpus import ADAPTED, Q0, Q1, V0, V1, Case, Kit

PREFIX = "base_model.model."


def cases(kit: Kit) -> Iterator[Case]:
    """All cases about the tensors of adapter_model.safetensors."""
    yield from _names(kit)
    yield from _pairs(kit)
    yield from _variants(kit)
    yield from _producers(kit)
    yield from _shapes(kit)
    yield from _values(kit)


def _names(kit: Kit) -> Iterator[Case]:
    lost = "UNKNOWN_TENSOR MISSING_MODULE"
    forms = {
        "no prefix": lambda name: name.removeprefix(PREFIX),
        "half a prefix": lambda name: name.removeprefix("base_model."),
        "doubled prefix": lambda name: PREFIX + name,
        "compiled model": lambda name: name.replace(PREFIX, PREFIX + "_orig_mod."),
        "data parallel": lambda name: "module." + name,
        "adapter name left in": lambda name: name.replace(".weight", ".default.weight"),
        "adapter called weight": lambda name: name.replace(".weight", ".weight.weight"),
        "language model of a VLM": lambda name: name.replace("model.layers", "model.language_model.layers"),
        "another family": lambda name: name.replace("model.layers", "transformer.h"),
        "parameter suffix missing": lambda name: name.removesuffix(".weight"),
    }
    for what, change in forms.items():
        values = kit.renamed(change)
        codes = "UNSUPPORTED_FULL_WEIGHT MISSING_MODULE" if what == "parameter suffix missing" else lost
        yield kit.tensed("B1", f"names: {what}", codes, next(iter(values)), values)
    misspelt = {name.replace(Q0, Q0.replace("q_proj", "q_porj")): value for name, value in kit.tensors.items()}
    yield kit.tensed("B2", "names: one module misspelt", lost, "q_porj", misspelt)
    odd = a_name(Q0).replace("lora_A", "lora_a")
    yield kit.tensed(
        "B2",
        "names: small a",
        "UNSUPPORTED_FORMAT INCOMPLETE_PAIR",
        odd,
        kit.renamed(lambda n: odd if n == a_name(Q0) else n),
    )
    deep = kit.tensors | {
        name.replace("layers.0", "layers.99"): value for name, value in kit.tensors.items() if Q0 in name
    }
    yield kit.tensed("B2", "names: layer 99", "UNKNOWN_TENSOR", "layers.99", deep)
    zeros = kit.tensors | {
        name.replace("layers.0", "layers.00"): value for name, value in kit.tensors.items() if Q0 in name
    }
    yield kit.tensed("B2", "names: layer 00", "UNKNOWN_TENSOR", "layers.00", zeros)
    minus = kit.tensors | {
        name.replace("layers.0", "layers.-1"): value for name, value in kit.tensors.items() if Q0 in name
    }
    yield kit.tensed("B2", "names: layer -1", "UNKNOWN_TENSOR", "layers.-1", minus)
    for extra in ("optimizer.state", "step", "lora_A.weight", PREFIX + "lora_A.weight", "rng_state"):
        code = "UNSUPPORTED_FULL_WEIGHT" if extra.startswith(PREFIX) else "UNKNOWN_TENSOR"
        yield kit.tensed("B2", f"names: extra {extra}", code, extra, kit.added(extra))
    crowd = [f"{'x' * 150}.{number}.lora_A.weight" for number in range(4000)]
    values = kit.added(*crowd, shape=(1, 1))
    yield kit.tensed("B2", "names: 4000 strangers", "UNKNOWN_TENSOR MORE_VIOLATIONS", "x" * 150, values)


def _pairs(kit: Kit) -> Iterator[Case]:
    for path, name in ((Q0, a_name(Q0)), (V1, b_name(V1))):
        values = {key: value for key, value in kit.tensors.items() if key != name}
        yield kit.tensed("B2", f"pairs: no {name.split('.')[-2]} in {path}", "INCOMPLETE_PAIR", path, values)
    only_a = {name: value for name, value in kit.tensors.items() if "lora_A" in name}
    yield kit.tensed("B2", "pairs: A everywhere, B nowhere", "INCOMPLETE_PAIR", a_name(V1), only_a)
    layer = {name: value for name, value in kit.tensors.items() if "layers.1" not in name}
    yield kit.tensed("B2", "pairs: a layer is missing", "MISSING_MODULE", Q1, layer)
    more = kit.pairs({**dict.fromkeys(ADAPTED, 2), "model.layers.0.mlp.up_proj": 2})
    yield kit.tensed("B2", "pairs: a module that is not targeted", "TARGET_MISMATCH", "mlp.up_proj", more)


def _variants(kit: Kit) -> Iterator[Case]:
    extras = {
        "magnitude of DoRA": (f"{PREFIX}{Q0}.lora_magnitude_vector", "UNSUPPORTED_DORA"),
        "magnitude with a suffix": (f"{PREFIX}{Q0}.lora_magnitude_vector.default.weight", "UNSUPPORTED_DORA"),
        "bias on B": (f"{PREFIX}{Q0}.lora_B.bias", "UNSUPPORTED_LORA_BIAS"),
        "bias of the base": (f"{PREFIX}{Q0}.base_layer.bias", "UNSUPPORTED_BIAS"),
        "diagonal of KaSA": (f"{PREFIX}{Q0}.lora_diag", "UNSUPPORTED_KASA"),
        "rows of tokens": (
            f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta",
            "UNSUPPORTED_TOKEN_DELTA",
        ),
        "experts, second parameter": (
            f"{PREFIX}model.layers.0.mlp.experts.base_layer.lora_A.weight",
            "UNSUPPORTED_PARAMETERS",
        ),
        "experts, first parameter": (f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight", "UNKNOWN_TENSOR"),
        "whole head": (f"{PREFIX}lm_head.weight", "UNSUPPORTED_FULL_WEIGHT"),
        "whole embedding": (f"{PREFIX}model.embed_tokens.weight", "UNSUPPORTED_FULL_WEIGHT"),
        "whole targeted embedding": (f"{PREFIX}model.embed_tokens.base_layer.weight", "UNSUPPORTED_FULL_WEIGHT"),
        "whole norm": (f"{PREFIX}model.layers.0.input_layernorm.weight", "UNSUPPORTED_FULL_WEIGHT"),
        "saved module": (f"{PREFIX}lm_head.modules_to_save.default.weight", "UNSUPPORTED_FULL_WEIGHT"),
        "LoRA on a norm": (a_name("model.norm"), "UNKNOWN_TENSOR"),
        "linear LoRA on the embedding": (a_name("model.embed_tokens"), "UNKNOWN_TENSOR"),
        "embedding LoRA on a linear": (f"{PREFIX}{Q0}.lora_embedding_A", "UNKNOWN_TENSOR"),
        "mixture vector": (f"{PREFIX}{Q0}.lora_mixture.weight", "UNSUPPORTED_FULL_WEIGHT"),
    }
    for what, (name, code) in extras.items():
        yield kit.tensed("B6", f"variant in the file: {what}", code, name, kit.added(name))
    vocab, hidden = kit.base.vocab_size, kit.modules["model.embed_tokens"].out_features
    table = f"{PREFIX}model.embed_tokens.lora_embedding_"
    for what, rows in {"embedding": vocab, "grown vocabulary": vocab + 2}.items():
        values = kit.tensors | {
            table + "A": np.ones((2, rows), np.float32),
            table + "B": np.ones((hidden, 2), np.float32),
        }
        codes = "TARGET_MISMATCH" + (" SHAPE_MISMATCH" if rows != vocab else "")
        yield kit.tensed("B8", f"variant in the file: LoRA on the {what}", codes, "model.embed_tokens", values)


def _producers(kit: Kit) -> Iterator[Case]:
    """Tensors of other programs, under a config that PEFT would take."""
    lost = "UNSUPPORTED_FORMAT MISSING_MODULE"
    a = {path: kit.tensors[a_name(path)] for path in ADAPTED}
    b = {path: kit.tensors[b_name(path)] for path in ADAPTED}

    def file(pattern_a: str, pattern_b: str, *, turned: bool = False, dots: str = ".") -> dict[str, np.ndarray]:
        values = {}
        for path in ADAPTED:
            name = path.replace(".", dots)
            values[pattern_a.format(name)] = a[path].T.copy() if turned else a[path]
            values[pattern_b.format(name)] = b[path].T.copy() if turned else b[path]
        return values

    files = {
        "MLX": file("{}.lora_a", "{}.lora_b", turned=True),
        "torchtune": file("{}.lora_a.weight", "{}.lora_b.weight"),
        "kohya": file("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight", dots="_"),
        "kohya text encoder": file("lora_te_{}.lora_down.weight", "lora_te_{}.lora_up.weight", dots="_"),
        "diffusers": file("{}.to_q_lora.down.weight", "{}.to_q_lora.up.weight"),
        "diffusers, older": file("{}.lora_linear_layer.down.weight", "{}.lora_linear_layer.up.weight"),
        "llama.cpp tensors": file("blk.{}.lora_a", "blk.{}.lora_b", dots="_"),
    }
    for what, values in files.items():
        yield kit.tensed("§10", f"producer: {what}", lost, next(iter(values)), values)
    alphas = files["kohya"] | {
        f"lora_unet_{path.replace('.', '_')}.alpha": np.ones((1,), np.float32) for path in ADAPTED
    }
    yield kit.tensed(
        "§10", "producer: kohya with alphas", "UNSUPPORTED_FORMAT UNKNOWN_TENSOR MISSING_MODULE", ".alpha", alphas
    )
    fused = {
        f"{PREFIX}model.layers.{layer}.self_attn.linear_qkv.lora_{part}.weight": np.ones((2, 2), np.float32)
        for layer in (0, 1)
        for part in "AB"
    }
    yield kit.tensed("§10", "producer: Megatron, fused", "UNKNOWN_TENSOR MISSING_MODULE", "linear_qkv", fused)
    bridge = {
        f"decoder.layers.{layer}.self_attention.linear_qkv.adapter.linear_{way}.weight": np.ones((2, 2), np.float32)
        for layer in (0, 1)
        for way in ("in", "out")
    }
    yield kit.tensed("§10", "producer: Megatron Bridge", "UNKNOWN_TENSOR MISSING_MODULE", "adapter.linear_in", bridge)
    whole = {f"{path}.weight": np.ones((4, 4), np.float32) for path in ADAPTED}
    yield kit.tensed("§10", "producer: a merged checkpoint", "UNKNOWN_TENSOR MISSING_MODULE", f"{Q0}.weight", whole)


def _shapes(kit: Kit) -> Iterator[Case]:
    inputs, outputs = kit.modules[V0].in_features, kit.modules[V0].out_features

    def case(source: str, name: str, codes: str, offender: str, **parts: tuple[int, ...]) -> Case:
        values = dict(kit.tensors)
        for part, shape in parts.items():
            values[{"a": a_name, "b": b_name}[part](V0)] = np.ones(shape, np.float32)
        return kit.tensed(source, f"shape: {name}", codes, offender, values)

    yield case("G1", "A transposed", "SHAPE_MISMATCH RANK_MISMATCH", a_name(V0), a=(inputs, 2))
    yield case("G1", "B transposed", "SHAPE_MISMATCH RANK_MISMATCH", b_name(V0), b=(2, outputs))
    yield case("G1", "both transposed", "SHAPE_MISMATCH RANK_MISMATCH", a_name(V0), a=(inputs, 2), b=(2, outputs))
    yield case("G1", "A one input short", "SHAPE_MISMATCH", a_name(V0), a=(2, inputs - 1))
    yield case("G1", "B one output more", "SHAPE_MISMATCH", b_name(V0), b=(outputs + 1, 2))
    yield case("§4", "A flat, as a bad sharded save leaves it", "SHAPE_MISMATCH", a_name(V0), a=(2 * inputs,))
    yield case("§4", "B flat", "SHAPE_MISMATCH", b_name(V0), b=(2 * outputs,))
    yield case("§4", "A of a convolution", "SHAPE_MISMATCH", a_name(V0), a=(2, inputs, 1, 1))
    yield case("§7", "A of two experts", "RANK_MISMATCH", a_name(V0), a=(4, inputs))
    yield case("§3.2", "A of QALoRA, columns in groups", "SHAPE_MISMATCH", a_name(V0), a=(2, inputs // 2))
    yield case("§4", "B of BD-LoRA, blocks stacked", "RANK_MISMATCH", a_name(V0), b=(outputs, 1))
    yield case("A3", "ranks of A and B differ", "RANK_MISMATCH", a_name(V0), a=(3, inputs))
    yield case("A3", "both ranks of another config", "RANK_MISMATCH", a_name(V0), a=(3, inputs), b=(outputs, 3))
    yield case("G1", "rank beyond the limit", "RANK_LIMIT", "rank 300", a=(300, inputs), b=(outputs, 300))
    double = {
        name: np.ones([size * 2 if size > 2 else size for size in value.shape], np.float32)
        for name, value in kit.tensors.items()
    }
    yield kit.tensed(
        "B9", "shape: a base of twice the width", "SHAPE_MISMATCH WRONG_BASE_SHAPE", "none of the 4", double
    )


def _values(kit: Kit) -> Iterator[Case]:
    def spoiled(name: str, value: float, at: int = -1) -> dict[str, np.ndarray]:
        values = {key: item.copy() for key, item in kit.tensors.items()}
        values[name].flat[at] = value
        return values

    for what, value in {"NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}.items():
        for where, name, at in (("first of A", a_name(Q0), 0), ("last of B", b_name(V1), -1)):
            yield kit.tensed("G3", f"value: {what}, {where}", "NON_FINITE", name, spoiled(name, value, at))
    for dtype in ("F16", "BF16"):
        values = spoiled(b_name(Q1), math.nan)
        yield kit.case("G3", f"value: NaN in {dtype}", "NON_FINITE", b_name(Q1), weights=pack(*entries(values, dtype)))
    header, data = kit.header("F16")
    begin, end = header[a_name(Q0)]["data_offsets"]
    over = as_dtype(np.full((end - begin) // 2, 1.0), "F16")[:-2] + (0x7C00).to_bytes(2, "little")
    content = pack(header, data[:begin] + over + data[end:])
    yield kit.case("G3", "value: 70 000 saved as F16", "NON_FINITE", a_name(Q0), weights=content)
    signalling = bytearray(kit.header()[1])
    signalling[:4] = (0x7F800001).to_bytes(4, "little")
    yield kit.case(
        "G3", "value: signalling NaN", "NON_FINITE", a_name(Q0), weights=pack(kit.header()[0], bytes(signalling))
    )
    everywhere = {name: np.full_like(value, math.nan) for name, value in kit.tensors.items()}
    yield kit.tensed("G3", "value: nothing but NaN", "NON_FINITE", a_name(V1), everywhere)
    huge = kit.tensors | {name: np.full_like(kit.tensors[name], 3e38) for name in (a_name(V0), b_name(V0))}
    yield kit.tensed("G3", "value: a product that overflows", "UPDATE_OVERFLOW", V0, huge)
    for what, factor in {"a thousand times": 1e3, "a billion times": 1e9}.items():
        values = {
            name: value * np.float32(factor) if name in (a_name(V0), b_name(V0)) else value
            for name, value in kit.tensors.items()
        }
        yield kit.tensed("G3", f"value: A and B {what} too large", "UPDATE_NORM", V0, values)
    last = b_name(V1)
    begin, end = kit.header()[0][last]["data_offsets"]
    header, data = kit.header()
    half = as_dtype(kit.tensors[last], "F16")
    mixed = {**header, last: {**header[last], "dtype": "F16", "data_offsets": [begin, begin + len(half)]}}
    yield kit.case(
        "G1", "value: one tensor of another dtype", "MIXED_DTYPE", "F16", weights=pack(mixed, data[:begin] + half)
    )
    several = encode(config_of(lora_alpha=-1, use_dora=True))
    nan = pack(*entries(spoiled(a_name(Q0), math.nan) | {"step": np.ones((1, 1), np.float32)}))
    codes = "CONFIG_BAD_VALUE UNSUPPORTED_DORA UNKNOWN_TENSOR NON_FINITE"
    yield kit.case("B2", "value: five faults at once", codes, "step", config=several, weights=nan)
