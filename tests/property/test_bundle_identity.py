"""What changes a revision id: the meaning of the bytes. What does not: how they are written down."""

import json
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from loraport.bundle.manifest import build_manifest, parse_manifest
from tests.bundle_files import Q0, Q1, V0, V1, config, entries, pack, small_base, tensors, verify, weights

FAST = settings(max_examples=60)
PLAIN = verify().revision_id
names = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {key: shuffled(item, rng) for key, item in items}
    return rng.sample(value, len(value)) if isinstance(value, list) else value


@FAST
@given(st.randoms(use_true_random=False), st.integers(0, 8) | st.none(), st.booleans())
def test_order_and_spacing_do_not_matter(rng: random.Random, indent: int | None, as_float: bool) -> None:
    settings_ = config(
        lora_alpha=4.0 if as_float else 4,
        alpha_pattern={"layers.0.self_attn.q_proj": 8, "layers.1.self_attn.q_proj": 16, "v_proj": 2},
    )
    expected = verify(settings_).revision_id
    data = json.dumps(shuffled(settings_, rng), indent=indent).encode()
    assert verify(data).revision_id == expected is not None


@FAST
@given(
    st.text(max_size=20, alphabet=st.characters(codec="utf-8")),
    st.sampled_from(["0.18.0", "0.21.2", None]),
    st.floats(0, 1),
    st.booleans(),
)
def test_history_in_the_config_does_not_matter(path: str, version: str | None, dropout: float, mode: bool) -> None:
    changed = config(base_model_name_or_path=path, peft_version=version, lora_dropout=dropout, inference_mode=mode)
    assert verify(changed).revision_id == PLAIN


@FAST
@given(st.integers(1, 90), st.booleans())
def test_the_scale_matters(alpha: int, stabilized: bool) -> None:
    verdict = verify(config(lora_alpha=alpha, use_rslora=stabilized))
    assert verdict.admitted
    assert (verdict.revision_id == PLAIN) == (alpha == 4 and not stabilized)


@FAST
@given(names, st.sampled_from("ad"))
def test_tenant_and_base_matter(tenant: str, digit: str) -> None:
    found = verify(tenant=tenant, base=small_base(weights=digit)).revision_id
    assert (found == PLAIN) == (tenant == "acme" and digit == "a")


@FAST
@given(st.integers(0, len(weights()) - 1), st.integers(1, 255))
def test_every_byte_of_the_weights_matters(at: int, flip: int) -> None:
    changed = bytearray(weights())
    changed[at] ^= flip
    assert verify(content=bytes(changed)).revision_id != PLAIN


@FAST
@given(
    names,
    st.integers(1, 2**53 - 1),
    st.datetimes().map(lambda time: f"{time:%Y-%m-%dT%H:%M:%SZ}".rjust(20, "0")),
    st.text(min_size=1, max_size=30, alphabet=st.characters(codec="utf-8")),
)
def test_name_version_time_and_source_do_not_matter(adapter: str, version: int, time: str, text: str) -> None:
    data = build_manifest(
        verify(),
        adapter=adapter,
        version=version,
        created_time=time,
        source={"kind": "upload", "uri": text},
        notes=text,
    )
    assert parse_manifest(data).revision_id == PLAIN


@FAST
@given(st.permutations([Q0, V0, Q1, V1]), st.dictionaries(st.sampled_from([Q0, V0, Q1, V1]), st.integers(1, 9)))
def test_the_table_is_sorted_and_has_the_ranks_of_the_file(order: list[str], ranks: dict[str, int]) -> None:
    every = {path: ranks.get(path, 2) for path in order}
    data = pack(*entries(tensors(every)))
    verdict = verify(config(rank_pattern={path: rank for path, rank in every.items() if rank != 2}), data)
    assert verdict.admitted, verdict.violations
    assert [module.path for module in verdict.modules] == sorted(every)
    assert {module.path: module.rank for module in verdict.modules} == every
    assert all(module.scaling == 4 / module.rank for module in verdict.modules)
