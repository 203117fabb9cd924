"""Three laws of admission, each with a generator that tries to break it.

 1. Whatever the bytes are, verification ends in a verdict.
 2. What was signed and then changed is not accepted.
 3. What is admitted means to PEFT exactly what it means to us: the same modules, ranks, scales and numbers.

`LORAPORT_FUZZ_EXAMPLES` sets how many examples each law is tried with; the default keeps the suite short. `make fuzz` runs
the same laws under a coverage-guided fuzzer.
"""

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from loraport.bundle.base import BaseSpec
from loraport.bundle.base_dir import read_base_dir
from loraport.bundle.bundle_dir import verify_dir
from loraport.bundle.canonical import canonical
from loraport.bundle.codes import VIOLATIONS, WARNINGS
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, EnvelopeError, SigningKey, sign_envelope, verify_envelope
from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME, ManifestError, build_manifest, parse_manifest
from loraport.bundle.verify import verify_bundle
from tests.bundle_files import a_name, b_name, config, entries, pack, small_base, verify
from tests.security.corpus import Kit, corpus

EXAMPLES = int(os.environ.get("LORAPORT_FUZZ_EXAMPLES", "0"))
BASE = small_base()
KIT = Kit(BASE)
# Seeds of kilobytes: a bomb of a megabyte is one case, not a source of small changes.
SEEDS = [case for case in corpus(BASE) if case.disturb is None and len(case.weights or b"") < 20_000]
CONFIGS = [case.config for case in SEEDS if case.config is not None and len(case.config) < 5000]
WEIGHTS = [case.weights for case in SEEDS if case.weights is not None]
KEY = SigningKey.generate()


def law(examples: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=EXAMPLES or examples, deadline=None, suppress_health_check=slow)


@st.composite
def mutated(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with a few changes: single bytes, pieces moved, doubled or dropped, numbers of eight bytes."""
    data = bytearray(draw(good))
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(1, 40))
        match draw(st.sampled_from(["bit", "drop", "double", "insert", "number", "cut"])):
            case "bit" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "drop":
                del data[at : at + length]
            case "double":
                data[at:at] = data[at : at + length]
            case "insert":
                data[at:at] = draw(
                    st.binary(min_size=1, max_size=9)
                    | st.sampled_from([b'"', b"{", b"[", b"\\u0000", b"e9", b",", b"}"])
                )
            case "number":
                data[at : at + 8] = draw(st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1])).to_bytes(8, "little")
            case "cut":
                del data[at:]
    return bytes(data)


def judged(configuration: bytes, content: bytes) -> None:
    verdict = verify_bundle(configuration, content, base=BASE, tenant="acme")
    assert verdict.admitted == (not verdict.violations) == (verdict.revision_id is not None)
    assert {found.code for found in verdict.violations} <= VIOLATIONS.keys()
    assert {found.code for found in verdict.warnings} <= WARNINGS.keys()
    assert all(isinstance(text, str) for found in verdict.violations for text in (found.detail, found.subject))
    if verdict.identity is not None:
        assert canonical(dict(verdict.identity))


@law(150)
@given(
    st.binary(max_size=200) | mutated(st.sampled_from(CONFIGS)) | st.sampled_from(CONFIGS),
    st.binary(max_size=200) | mutated(st.sampled_from(WEIGHTS)) | st.sampled_from(WEIGHTS),
)
def test_any_bytes_get_a_verdict(configuration: bytes, content: bytes) -> None:
    judged(configuration, content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@law(100)
@given(
    st.dictionaries(st.sampled_from(sorted(config())) | st.text(max_size=10), json_values, max_size=4),
    st.dictionaries(
        st.sampled_from([*KIT.tensors, "__metadata__"]) | st.text(max_size=10),
        json_values | st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values}),
        max_size=3,
    ),
)
def test_any_structure_gets_a_verdict(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    header, data = KIT.header()
    try:
        configuration, content = json.dumps({**config(), **keys}).encode(), pack({**header, **tensors}, data)
    except UnicodeEncodeError:
        return
    judged(configuration, content)


# ---------------------------------------------------------------- the second law

MANIFEST = build_manifest(
    verify(KIT.good_config, KIT.good_weights),
    adapter="a",
    version=1,
    created_time="2026-01-01T00:00:00Z",
    source={"kind": "directory", "uri": "x"},
)
SIGNED = {
    "envelope": sign_envelope(IN_TOTO_PAYLOAD_TYPE, MANIFEST, KEY),
    "config": KIT.good_config,
    "weights": KIT.good_weights,
}


def accepted(parts: Mapping[str, bytes], *, tenant: str = "acme", base: BaseSpec = BASE) -> bool:
    """What every hop asks: is the signature good, are these the bytes, and do they mean what was signed?"""
    try:
        payload = verify_envelope(
            parts["envelope"], payload_type=IN_TOTO_PAYLOAD_TYPE, trusted={KEY.key_id: KEY.public_pem}
        )
        manifest = parse_manifest(payload)
    except (EnvelopeError, ManifestError):
        return False
    verdict = verify_bundle(parts["config"], parts["weights"], base=base, tenant=tenant)
    found = (verdict.revision_id, verdict.weights_digest, verdict.config_digest)
    return verdict.admitted and found == (manifest.revision_id, manifest.weights_digest, manifest.config_digest)


def test_unchanged_parts_are_accepted() -> None:
    assert accepted(SIGNED)
    assert not accepted(SIGNED, tenant="globex")
    assert not accepted(SIGNED, base=small_base(weights="d"))


@law(150)
@given(st.data(), st.sampled_from(sorted(SIGNED)))
def test_what_is_signed_and_then_changed_is_not_accepted(data: st.DataObject, part: str) -> None:
    changed = data.draw(mutated(st.just(SIGNED[part])))
    assume(changed != SIGNED[part])
    if not accepted({**SIGNED, part: changed}):
        return
    # An envelope may be written in other ways (spaces, order) and still carry the very same payload; bytes may not.
    assert part == "envelope"
    payload = verify_envelope(changed, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted={KEY.key_id: KEY.public_pem})
    assert payload == MANIFEST


# ---------------------------------------------------------------- the third law

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.gate_proj")
PATHS = tuple(f"model.layers.{layer}.{name}" for layer in (0, 1) for name in PROJECTIONS)
ENDS = (
    "q_proj",
    "proj",
    "self_attn.q_proj",
    "layers.1.mlp.down_proj",
    "model.layers.0.self_attn.k_proj",
    "down_proj",
    "gate_proj",
)


@st.composite
def bundles(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, int]]:
    """A config and the rank of every module in the file, as PEFT resolves it; now and then they disagree."""
    from peft.utils.other import get_pattern_key

    names = draw(st.lists(st.sampled_from(ENDS[:3] + ENDS[5:] + PATHS), min_size=1, max_size=3, unique=True))
    ranks = draw(st.dictionaries(st.sampled_from(ENDS), st.integers(1, 6), max_size=2))
    alphas = draw(st.dictionaries(st.sampled_from(ENDS), st.integers(1, 40) | st.floats(0.5, 40), max_size=2))
    layers = draw(st.none() | st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True))
    value = config(
        target_modules=names,
        r=draw(st.integers(1, 6)),
        lora_alpha=draw(st.integers(1, 40) | st.floats(0.5, 40)),
        use_rslora=draw(st.booleans()),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        layers_to_transform=layers,
        exclude_modules=draw(st.none() | st.lists(st.sampled_from(ENDS), max_size=1)),
    )
    chosen = [path for path in PATHS if _targeted(value, path)]
    resolved = {path: ranks.get(get_pattern_key(list(ranks), path), value["r"]) for path in chosen}
    if resolved and draw(st.integers(0, 9)) == 0:
        resolved[draw(st.sampled_from(sorted(resolved)))] += 1
    return value, resolved


def _targeted(value: dict[str, Any], path: str) -> bool:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

    keys = ("target_modules", "exclude_modules", "layers_to_transform")
    found = check_target_module_exists(LoraConfig(**{key: value[key] for key in keys}), path)
    return bool(found) and not isinstance(found, _ExcludedModule)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, BaseSpec]:
    """A base of two small layers, for PEFT and for us."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    return make_llama(tmp_path_factory.mktemp("base"))


def make_llama(folder: Path) -> tuple[Any, BaseSpec]:
    """Write a base of two small layers to `folder`; return the model and what we make of it."""
    import transformers

    shape = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(shape)
    model.save_pretrained(folder)
    return model, read_base_dir(folder)


@law(30)
@given(bundles(), st.sampled_from(["F32", "F16", "BF16"]))
def test_what_is_admitted_means_the_same_to_peft(
    llama: tuple[Any, BaseSpec], bundle: tuple[dict[str, Any], dict[str, int]], dtype: str
) -> None:
    model, base = llama
    value, ranks = bundle
    assume(ranks)
    shapes = {module.path: (module.in_features, module.out_features) for module in base.modules}
    rng = np.random.default_rng(3)
    values = {}
    for path, rank in ranks.items():
        values[a_name(path)] = rng.standard_normal((rank, shapes[path][0]), dtype=np.float32)
        values[b_name(path)] = rng.standard_normal((shapes[path][1], rank), dtype=np.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In the order of the dict: PEFT takes the first pattern that matches.
        (folder / CONFIG_NAME).write_text(json.dumps(value))
        (folder / WEIGHTS_NAME).write_bytes(pack(*entries(values, dtype)))
        verdict = verify_dir(folder, base=base, tenant="acme")
        event("admitted" if verdict.admitted else f"refused: {sorted({found.code for found in verdict.violations})}")
        if not verdict.admitted:
            return
        theirs = _as_peft_reads_it(model, folder)
    assert {module.path: (module.rank, module.scaling) for module in verdict.modules} == {
        path: (rank, scaling) for path, (rank, scaling, _, _) in theirs.items()
    }
    for path, (_, _, a, b) in theirs.items():
        assert np.allclose(a, values[a_name(path)], atol=0.05)
        assert np.allclose(b, values[b_name(path)], atol=0.05)


def _as_peft_reads_it(model: Any, folder: Path) -> dict[str, tuple[int, float, np.ndarray, np.ndarray]]:
    """Rank, scale, A and B of every module that PEFT adapts with the bundle in `folder`."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT only warns of shows in the numbers
        wrapped = PeftModel.from_pretrained(copy.deepcopy(model), str(folder), torch_device="cpu")
    found = {}
    for name, module in wrapped.named_modules():
        if isinstance(module, LoraLayer):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            path = name.removeprefix("base_model.model.")
            numbers = (a.detach().float().numpy(), b.detach().float().numpy())
            found[path] = (module.r["default"], module.scaling["default"], *numbers)
    return found
